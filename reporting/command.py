"""report.py"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import attrs

from common.arguments import UsageError, option
from common.checks import number
from common.errors import printable
from reporting.section import COLOURS

PROJECT = "lockstep"
NICENESS = 10  # the machine may be training
SECONDS = number(0, 1e6, above=True, example="30")


@attrs.frozen(kw_only=True)
class ReportCommand:
    """Write one HTML file about runs: curves, cost, samples, differences."""

    runs: Annotated[tuple[Path, ...], option("run directory", name="RUN...", required=True)] = attrs.field(
        kw_only=False
    )
    output: Annotated[
        Path | None, option("default: report.html in the run directory; of several runs, here", "FILE")
    ] = None
    no_samples: Annotated[
        bool, option("do not load checkpoints, to record what they say and expect; show what is recorded")
    ] = False
    to: Annotated[
        Literal["tensorboard", "wandb", "trackio"] | None,
        option("send the metrics that it lacks to a tracker, and write no page"),
    ] = None
    project: Annotated[
        str | None, option("with --to wandb and trackio: project of the runs; default: " + PROJECT, "NAME")
    ] = None
    watch: Annotated[bool, option("write it again as the runs grow, until they end or Ctrl-C")] = False
    every: Annotated[
        float | None, option("with --watch: seconds between looks; default: 10", "SECONDS", check=SECONDS)
    ] = None

    def __attrs_post_init__(self) -> None:
        if self.every is not None and not self.watch:
            raise UsageError("--every goes with --watch")
        if self.project is not None and self.to not in ("wandb", "trackio"):
            raise UsageError("--project goes with --to wandb or --to trackio")
        if self.to is not None and (self.output is not None or self.no_samples):
            raise UsageError("--to writes no page: leave out --output and --no-samples")
        places = list(map(os.path.realpath, self.runs))
        if twice := [str(run) for run, place in zip(self.runs, places, strict=True) if places.count(place) > 1]:
            raise UsageError(f"RUN...: {' and '.join(twice)} are one run; give it once")
        if self.to is None and len(self.runs) > COLOURS:
            raise UsageError(f"RUN...: got {len(self.runs)}, wanted {COLOURS} at most: a page has {COLOURS} colours")

    def run(self) -> None:
        """Write the report."""
        from common.installation import keep_logs_only
        from reporting.report_file import check_report
        from reporting.watch import watch

        keep_logs_only()
        os.nice(NICENESS)
        if self.to is not None:
            self._replay(self.to)
            return
        check_report(self._file)
        if self.watch:
            watch(self.runs, self._write, self.every or 10.0)
        else:
            self._write()

    @property
    def _file(self) -> Path:
        from training.telemetry.metrics_log import REPORT

        return self.output or (self.runs[0] if len(self.runs) == 1 else Path()) / REPORT

    def _replay(self, name: str) -> None:
        from reporting.trackers.tracker_registry import store_of
        from reporting.trackers.tracker_sync import Replay
        from reporting.watch import watch

        opener = store_of(name)
        replays = [Replay(run, name, self.project or PROJECT, opener) for run in self.runs]

        def advance(*, last: bool = False) -> None:
            for run, replay in zip(self.runs, replays, strict=True):
                sent, held = replay.advance()
                if last:
                    replay.close()  # may find that the tracker has not taken all
                print(printable(f"{run}: {sent:,} steps sent to {name}, {held:,} there"), flush=True)

        with ExitStack() as stack:
            for replay in replays:
                stack.callback(replay.close)
            if self.watch:
                watch(self.runs, advance, self.every or 10.0)
            advance(last=True)

    def _write(self) -> None:
        from reporting.samples.sample_recording import lacks_samples

        if not self.no_samples and any(map(lacks_samples, self.runs)):
            self._draw(record=False)  # what is known: to record the samples of a large model takes minutes
        notes = self._draw(record=not self.no_samples)
        print(*map(printable, [*notes, f"report {self._file}"]), sep="\n", flush=True)

    def _draw(self, *, record: bool) -> list[str]:
        """Write the page; return notes."""
        from reporting.report_file import write_report
        from reporting.report_page import report_page
        from reporting.run_history import read_history, run_names
        from reporting.samples.sample_sections import sample_sections

        histories = [
            attrs.evolve(read_history(run), name=name)
            for run, name in zip(self.runs, run_names(self.runs), strict=True)
        ]
        sections, notes = sample_sections(self.runs, record=record)
        write_report(self._file, report_page(self.runs, histories, sections))
        return [note for history in histories for note in history.notes] + notes
