"""Training chart, `training-run-chart.png`: losses, learning rate and gradient norm from `metrics.jsonl`.

`python -m training.telemetry.chart RUN_DIR` draws it; a run starts that in the background at its checkpoints.
"""

import io
import math
import sys
from pathlib import Path
from typing import Any

from common.errors import BadInput, printable
from common.files import replace_file, writing
from common.installation import guard_outputs, keep_logs_only
from training.telemetry.background_drawing import BackgroundDrawing
from training.telemetry.metrics_log import read_metrics

CHART = "training-run-chart.png"
SMOOTHED_SHARE = 0.02  # width of the moving average, as a share of the logged steps
TRAIN, VALIDATION, RATE, NORM = "#4477aa", "#cc3311", "#228833", "#aa7744"


def background_chart(directory: Path) -> BackgroundDrawing:
    """Return the chart of a run, to be drawn in the background."""
    arguments = ["-m", "training.telemetry.chart", str(directory.resolve())]
    return BackgroundDrawing(name="chart", file=directory / CHART, arguments=arguments)


def draw_chart(directory: Path) -> Path:
    """Draw the chart of a run directory and return its path. The file is replaced in one go.

    Raises BadInput where the metrics cannot be read or the chart cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    records = read_metrics(directory)
    train = [record for record in records if "train_loss" in record]
    validation = [record for record in records if "validation_loss" in record]
    figure = Figure(figsize=(9, 8))
    loss, rate, norm = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    # A layout that finds its margins takes as long as the drawing.
    figure.subplots_adjust(left=0.1, right=0.98, top=0.96, bottom=0.06, hspace=0.08)

    steps = [record["step"] for record in train]
    losses = [record["train_loss"] for record in train]
    loss.plot(steps, losses, color=TRAIN, alpha=0.3, linewidth=1)
    loss.plot(steps, _smoothed(losses), color=TRAIN, linewidth=2, label=_label("train", train, "train_loss"))
    validation_steps = [record["step"] for record in validation]
    validation_losses = [record["validation_loss"] for record in validation]
    label = _label("validation", validation, "validation_loss")
    loss.plot(validation_steps, validation_losses, color=VALIDATION, marker="o", markersize=4, label=label)
    for dataset, points in _other_losses(validation).items():
        name = printable(dataset).replace("$", r"\$")  # no mathematics
        label = f"{name}: {points[-1][1]:.4f}"
        loss.plot(*zip(*points, strict=True), marker="o", markersize=4, alpha=0.6, label=label)
    loss.set_ylabel("loss (nats per token)")
    last = max(steps + validation_steps, default=0)
    loss.set_title(f"{printable(directory.name)}: step {last:,}", parse_math=False)  # a dollar sign is one
    loss.legend(loc="upper right")
    rate.plot(steps, [record.get("learning_rate", math.nan) for record in train], color=RATE)
    rate.set_ylabel("learning rate")
    norm.plot(steps, [record.get("grad_norm") or math.nan for record in train], color=NORM, linewidth=1)
    norm.set_ylabel("gradient norm\n(before clipping)")
    norm.set_yscale("log")
    norm.set_xlabel("step (optimizer updates)")
    norm.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss, rate, norm):
        axes.grid(alpha=0.25)
        for resumed in [record["step"] for record in records if record.get("event") == "start" and record["step"] > 0]:
            axes.axvline(resumed, color="gray", linestyle=":", linewidth=1)

    path, drawn = directory / CHART, io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    with writing(path):
        replace_file(path, drawn.getvalue())
    return path


def _smoothed(values: list[float]) -> list[float]:
    """Return the bias-corrected exponential moving average (Kingma and Ba 2015, section 3); few values stay."""
    decay = 1 - 1 / max(1.0, len(values) * SMOOTHED_SHARE)
    smoothed, average = [], 0.0
    for count, value in enumerate(values, start=1):
        average = decay * average + (1 - decay) * value
        smoothed.append(average / (1 - decay**count))
    return smoothed


def _other_losses(validation: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return (step, loss) on each dataset of a mixture but the first."""
    points: dict[str, list[tuple[int, float]]] = {}
    for record in validation:
        for dataset, value in list(record.get("validation_losses", {}).items())[1:]:
            points.setdefault(dataset, []).append((record["step"], value))
    return points


def _label(name: str, records: list[dict[str, Any]], key: str) -> str:
    return f"{name}: {records[-1][key]:.4f}" if records else name


if __name__ == "__main__":
    guard_outputs()
    keep_logs_only()  # else it would wait for its run's stderr, and the run for the chart
    try:
        draw_chart(Path(sys.argv[1]))
    except BadInput as error:
        sys.exit(f"WARNING: {error}")
