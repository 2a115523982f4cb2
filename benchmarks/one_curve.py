"""The picture in the README: a run that is stopped, killed and moved from 1 to 2 to 4 ranks, and an undisturbed run.

python benchmarks/one_curve.py OUTPUT.html

The script trains runs/quickstart twice on its tokens, which `make train` prepares, and compares the hash of weights and
moments at every logged step. Next to the curves, the page has held-out text, colored by the model's losses. The exit
status is 1 if a hash differs.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import bench
import numpy as np
from bench import LOOK_SECONDS, ROOT, kill_tree, launcher

from common.errors import EXIT_DONE, EXIT_STOPPED, BadInput
from common.line_chart import Line, LineChart, VerticalMark
from common.web_page import render
from reporting.samples.sample_log import read_samples, record_samples
from reporting.samples.sample_sections import heat_map
from training.checkpoints.directory import checkpoints_of, steps_in
from training.supervision.run_lock import EXIT_FILE
from training.telemetry.metrics_log import METRICS, Metric, read_metrics

QUICKSTART = ROOT / "runs" / "quickstart"
LOG_INTERVAL = 3  # in steps; the run usually has 1,221 steps, a multiple of 3, so its last step is logged and compared
CTRL_C, KILL, END = "Ctrl-C", "kill -9", "end"
UNTOUCHED_COLOR = 7  # index in the chart's palette; the legs have the first colors of the palette


@attrs.frozen(kw_only=True)
class Leg:
    """A part of the run: how it is started, and how it ends."""

    ranks: int
    parallel: str
    share: float  # the leg ends after this share of the run's steps
    ending: str  # CTRL_C, KILL or END

    @property
    def name(self) -> str:
        """The layout, for the legend."""
        return f"{self.ranks} {'ranks' if self.ranks > 1 else 'rank'}, {self.parallel.upper()}"


LEGS = (
    Leg(ranks=1, parallel="ddp", share=0.25, ending=CTRL_C),
    Leg(ranks=2, parallel="ddp", share=0.55, ending=KILL),
    Leg(ranks=4, parallel="fsdp", share=1.0, ending=END),
)
UNTOUCHED = Leg(ranks=2, parallel="ddp", share=1.0, ending=END)


@attrs.frozen(kw_only=True)
class ComparedStep:
    """A step at which the two runs are compared."""

    step: int
    event: str  # how the leg ended, and where the next leg resumed
    moved: str  # hash of the run that was stopped and moved
    untouched: str  # hash of the undisturbed run


def main(output: Path, /) -> None:
    """Train both runs, write the page and print the comparison."""
    if not (ROOT / "token_files" / "quickstart" / "manifest.json").exists():
        raise BadInput("token_files/quickstart is missing; prepare it with: make token_files/quickstart/manifest.json")
    with TemporaryDirectory() as folder:
        untouched, moved = (_write_run(Path(folder) / name) for name in ("untouched", "moved"))
        steps, _ = _train_leg(untouched, UNTOUCHED, 0)
        ends = [_train_leg(moved, leg, steps) for leg in LEGS]
        untouched_hashes, moved_hashes = (_hashes(run) for run in (untouched, moved))
        differing = [step for step in untouched_hashes if moved_hashes.get(step) != untouched_hashes[step]]
        record_samples(moved)
        samples, _ = read_samples(moved)
        page = render(
            "benchmarks/one_curve.html",
            title="One run directory, one curve",
            chart=_chart(untouched, moved, ends).svg(),
            legend=[*((f"s{number}", leg.name) for number, leg in enumerate(LEGS))],
            rows=list(_compare(untouched_hashes, moved_hashes, ends)),
            equal=len(untouched_hashes) - len(differing),
            logged=len(untouched_hashes),
            text=heat_map([("quickstart", samples[-1:])]),
        )
        output.write_text(page)
    count = len(untouched_hashes)
    print(f"{count - len(differing)} of {count} logged steps have the same hash; page {output}")
    for row in _compare(untouched_hashes, moved_hashes, ends):
        print(f"step {row.step:,}  {row.event}  {row.moved}  {row.untouched}")
    if differing:
        raise BadInput(f"the hashes differ from step {differing[0]} on")


def _write_run(run: Path) -> Path:
    model, train = (json.loads((QUICKSTART / name).read_text()) for name in ("model.json", "train.json"))
    train |= {"dataset": str(ROOT / train["dataset"]), "log_interval": LOG_INTERVAL}
    run.mkdir()
    (run / "model.json").write_text(json.dumps(model))
    (run / "train.json").write_text(json.dumps(train))
    return run


def _train_leg(run: Path, leg: Leg, steps: int) -> tuple[int, int]:
    """Train until the end of a leg. Return the last logged step, and the step from which the next leg resumes."""
    process = _start(run, leg)
    last = None if leg.ending == END else round(leg.share * steps)
    while process.poll() is None and last is not None:
        if _last_step(run) >= last:
            if leg.ending == KILL:
                kill_tree(process)
                break
            os.killpg(process.pid, signal.SIGINT)
            last = None
        time.sleep(LOOK_SECONDS)
    _, errors = process.communicate()
    status = EXIT_DONE if leg.ending == END else EXIT_STOPPED
    if leg.ending != KILL and json.loads((run / EXIT_FILE).read_text())["status"] != status:
        raise BadInput(f"{leg.name}: train.py failed: {errors[-4000:]}")
    newest = steps_in(checkpoints_of(run))[-1]
    return _last_step(run), int(newest.removeprefix("step-"))


def _start(run: Path, leg: Leg) -> "subprocess.Popen[str]":
    options = ["--device", "cpu", "--hash-every", str(LOG_INTERVAL), f"--set=parallel={leg.parallel}"]
    command = [*launcher(leg.ranks), "train.py", str(run), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _records(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run) if (run / METRICS).exists() else []


def _last_step(run: Path) -> int:
    return max((record["step"] for record in _records(run) if Metric.TRAIN_LOSS in record), default=0)


def _hashes(run: Path) -> dict[int, str]:
    return {record["step"]: record[Metric.STATE_SHA256] for record in _records(run) if Metric.STATE_SHA256 in record}


def _chart(untouched: Path, moved: Path, ends: Sequence[tuple[int, int]]) -> LineChart:
    """Return the chart of both losses. The legs are colored lines on top of the thick line of the undisturbed run."""
    untouched_x, untouched_y = _losses(untouched)
    lines = [Line(name="untouched", x=untouched_x, y=untouched_y, color=UNTOUCHED_COLOR, weight="below")]
    x, y = _losses(moved)
    first = 0
    for number, (leg, (_, resumed)) in enumerate(zip(LEGS, ends, strict=True)):
        part = (x >= first) & (x <= resumed)
        lines.append(Line(name=leg.name, x=x[part], y=y[part], color=number))
        first = resumed
    marks = [
        VerticalMark(x=last, style="restart", text=leg.ending)
        for leg, (last, _) in zip(LEGS[:-1], ends[:-1], strict=True)
    ]
    return LineChart(title="training loss, nats per byte", axis="steps", lines=lines, marks=marks, top=2.75)


def _losses(run: Path) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(record["step"], record[Metric.TRAIN_LOSS]) for record in _records(run) if Metric.TRAIN_LOSS in record]
    return np.array([step for step, _ in pairs]), np.array([loss for _, loss in pairs])


def _compare(
    untouched: dict[int, str], moved: dict[int, str], ends: Sequence[tuple[int, int]]
) -> Iterator[ComparedStep]:
    """Yield a row for each leg: the hash of its last step that was not lost, and the other run's hash at this step."""
    for number, (leg, (last, resumed)) in enumerate(zip(LEGS, ends, strict=True)):
        text = f"{leg.ending} at step {last:,}; {LEGS[number + 1].name} from {resumed:,}" if leg.ending != END else END
        step = max(step for step in untouched if step <= resumed)
        yield ComparedStep(step=step, event=text, moved=moved.get(step, "none")[:16], untouched=untouched[step][:16])


if __name__ == "__main__":
    bench.run(main)
