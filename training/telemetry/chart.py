"""Training chart, `training-run-chart.png`: losses, learning rate and gradient norm from `metrics.jsonl`.

`python -m training.telemetry.chart RUN_DIR` draws it; a run starts that in the background at its checkpoints.
"""

import io
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import BadInput, printable
from common.files import replace_file, writing
from common.installation import guard_outputs, keep_logs_only
from training.telemetry.metrics_log import read_metrics

CHART = "training-run-chart.png"
LEAST_SECONDS = 10.0  # between drawings
FAILED_SECONDS = 600.0  # after a failed drawing, which printed its error
LAST_SECONDS = 300.0  # longest wait for each of the last two; one that hangs, on a dead disk for one, is left
ROOT = Path(__file__).parents[2]
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # torchrun's variables: a drawing is no rank
SMOOTHED_SHARE = 0.02  # width of the moving average, as a share of the logged steps
TRAIN, VALIDATION, RATE, NORM = "#4477aa", "#cc3311", "#228833", "#aa7744"


class BackgroundChart:
    """The chart of a run, drawn by one process at a time: no step waits for it, and its failure ends no run."""

    def __init__(self, directory: Path):
        self.file = directory / CHART
        self._process: subprocess.Popen[bytes] | None = None
        self._began = time.monotonic()  # the last drawing, or this

    def redraw(self) -> None:
        """Start a drawing unless the last one still runs or is recent."""
        status = 0 if self._process is None else self._process.poll()
        pause = LEAST_SECONDS if status == 0 else FAILED_SECONDS
        if status is not None and time.monotonic() >= self._began + pause:
            self._start()

    def finish(self) -> bool:
        """Wait for a drawing in progress, draw the final state and wait for it; return whether it is drawn."""
        try:
            if self._process is not None:
                self._process.wait(LAST_SECONDS)
            self._start()
            return self._process is not None and self._process.wait(LAST_SECONDS) == 0
        except subprocess.TimeoutExpired:
            return False

    def _start(self) -> None:
        self._began = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
        command = [sys.executable, "-m", "training.telemetry.chart", str(self.file.parent.resolve())]
        self._process = None
        with suppress(OSError):  # no memory for another process: a run goes on without a chart
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C is for the run, which waits for its last chart
            )


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
