"""Training chart, `training-run-chart.png`: losses, learning rate and gradient norm from `metrics.jsonl`.

`python -m training.telemetry.chart RUN_DIR` draws it. A run starts this command in the background at its checkpoints.
"""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import attrs

from common.errors import EXIT_ERROR, BadInput
from common.files import check_replaceable, replace_file, writing
from common.launch import without_launcher
from common.output import guard_outputs, keep_logs_only, show, warning
from common.text import printable
from training.telemetry.metrics_log import RunEvent, event_of, read_metrics

CHART = "training-run-chart.png"
LEAST_SECONDS = 10.0  # pause between two drawings
FAILED_SECONDS = 600.0  # pause after a drawing that failed and printed its error
# At the end of a run, wait at most this long for the drawing in progress, and as long again for the final one. A
# drawing that takes longer, for example because it hangs on a dead disk, is abandoned.
LAST_SECONDS = 300.0
ROOT = Path(__file__).parents[2]


class BackgroundChart:
    """The chart of a run, drawn by one process at a time. No step waits for it, and its failures never end the run."""

    def __init__(self, directory: Path):
        self.file = directory / CHART
        self._process: subprocess.Popen[bytes] | None = None
        self._began = time.monotonic()  # when the last drawing was started, or this object was made

    def redraw(self) -> None:
        """Start a drawing, unless the last one is still running or was started only recently."""
        status = 0 if self._process is None else self._process.poll()
        pause = LEAST_SECONDS if status == 0 else FAILED_SECONDS
        if status is not None and time.monotonic() >= self._began + pause:
            self._start()

    def finish(self) -> bool:
        """Wait for a drawing in progress, then draw the final state; return whether the final drawing succeeded."""
        try:
            if self._process is not None:
                self._process.wait(LAST_SECONDS)
            self._start()
            return self._process is not None and self._process.wait(LAST_SECONDS) == 0
        except subprocess.TimeoutExpired:
            return False

    def _start(self) -> None:
        self._began = time.monotonic()
        command = [sys.executable, "-m", "training.telemetry.chart", str(self.file.parent.resolve())]
        self._process = None
        with suppress(OSError):  # if there is no memory for another process, the run continues without a chart
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                env=without_launcher(),
                # Ctrl-C in a terminal must reach only the run, which then waits for its last chart.
                start_new_session=True,
            )


def draw_chart(directory: Path) -> Path:
    """Draw the chart of a run directory; return its path. Raises BadInput if a file cannot be read or written."""
    from common.line_chart import PALETTE, Line, LineChart, VerticalMark, is_own_png, png
    from training.telemetry.curves import PANELS, TRAIN, losses, run_curves

    path = directory / CHART
    check_replaceable(path, is_own_png, "a chart of train.py")
    records = read_metrics(directory)
    curves = run_curves(records)
    lines = []
    for color, (name, curve) in enumerate(losses(curves).items()):
        label, palette_color = f"{printable(name)}: {curve.last:.4f}", color % len(PALETTE)
        line = Line(name=label, x=curve.steps, y=curve.values, color=palette_color, dotted=name != TRAIN)
        if name == TRAIN:
            lines.append(attrs.evolve(line, weight="raw"))
            line = attrs.evolve(line, y=curve.smoothed(), weight="bold")
        lines.append(line)
    restarts = [record["step"] for record in records if event_of(record) == RunEvent.START and record["step"] > 0]
    marks = [VerticalMark(x=step, style="restart", text="restart") for step in restarts]
    charts = [LineChart(title="loss, nats per token", axis="", lines=lines, marks=marks)]
    for color, panel in enumerate((panel for panel in PANELS if panel.in_image), start=2):
        panel_curves = [curves[panel.metric]] if panel.metric in curves else []
        lines = [
            Line(name=panel.metric, x=curve.steps, y=curve.values * panel.factor, color=color) for curve in panel_curves
        ]
        axis = "step (optimizer updates)"
        charts.append(LineChart(title=panel.title, axis=axis, lines=lines, marks=marks, logarithmic=panel.logarithmic))
    last = int(max((curve.steps[-1] for curve in curves.values()), default=0))
    image = png(charts, f"{printable(directory.name)}: step {last:,}", (3, 1, 1))
    with writing(path):
        replace_file(path, image)
    return path


if __name__ == "__main__":
    guard_outputs()
    keep_logs_only()  # otherwise this process would wait for the run's stderr while the run waits for the chart
    try:
        draw_chart(Path(sys.argv[1]))
    except BadInput as error:
        show(warning(str(error)))
        sys.exit(EXIT_ERROR)
