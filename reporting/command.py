"""report.py: its options, and what it does with them."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import attrs

from common.arguments import Command, option
from common.checks import number
from common.errors import BadInput, UsageError
from common.files import check_replaceable, replace_file, writing
from common.option_rules import OptionRules
from common.output import keep_logs_only, note, show
from training.checkpoints.directory import checkpoints_of, steps_in
from training.supervision.run_lock import EXIT_FILE, is_locked
from training.telemetry.metrics_log import EVALUATIONS, METRICS, REPORT

PROJECT = "lockstep"
MOST_SAMPLED = 8  # a page about more runs than this has no samples
NICENESS = 10  # gives a training run on the same machine priority over this process
LOOK_SECONDS = 10.0  # default time between two checks with --watch
# --watch ends after this number of checks in a row without a running job. A single check may find torchrun restarting a
# job.
IDLE_LOOKS = 2
SECONDS = number(0, 1e6, above=True, example="30")


@attrs.frozen(kw_only=True)
class ReportCommand:
    """Write one HTML file about runs: curves, cost, samples, differences."""

    option_rules: ClassVar[OptionRules] = OptionRules(
        work="the page",
        uses="--output --no-samples --watch --every",
        modes={"--to": "--project --watch --every", "--reference": ""},
        needs={"--every": "--watch", "--project": "--to=wandb --to=trackio"},
    )
    runs: Annotated[tuple[Path, ...], option("run directory, or folder of runs", name="RUN...", required=True)] = (
        attrs.field(kw_only=False)
    )
    output: Annotated[
        Path | None,
        option("the page; default: report.html in the run directory; for several runs, in the current folder", "FILE"),
    ] = None
    no_samples: Annotated[
        bool, option("do not load checkpoints to sample from them; show only samples recorded earlier")
    ] = False
    to: Annotated[
        Literal["tensorboard", "wandb", "trackio"] | None,
        option("send metrics that the tracker does not have yet; write no page"),
    ] = None
    project: Annotated[
        str | None, option("with --to wandb or trackio: the project of the runs; default: " + PROJECT, "NAME")
    ] = None
    reference: Annotated[
        Path | None,
        option("measure a recipe's expected loss range on these runs, and write it into DIR; write no page", "DIR"),
    ] = None
    watch: Annotated[
        bool, option("update the page or the tracker as the runs grow, until they end or you press Ctrl-C")
    ] = False
    every: Annotated[
        float | None, option("with --watch: seconds between updates; default: 10", "SECONDS", check=SECONDS)
    ] = None

    def __attrs_post_init__(self) -> None:
        if file := next(filter(Path.is_file, self.runs), None):
            raise UsageError(
                f"RUN...: {file} is a file, not a directory; for a sweep or a ladder, pass {file.with_suffix('')}"
            )
        real_paths = list(map(os.path.realpath, self.runs))
        repeated = [str(run) for run, path in zip(self.runs, real_paths, strict=True) if real_paths.count(path) > 1]
        if repeated:
            raise UsageError(f"RUN...: {' and '.join(repeated)} are the same run; pass it once")


def run(command: ReportCommand) -> None:
    """Write the page or a reference, or send metrics to a tracker. Raise BadInput if that fails."""
    from reporting.report_page import SIGN

    keep_logs_only()
    os.nice(NICENESS)
    if command.to is not None:
        _send(command, command.to)
        return
    if command.reference is not None:
        from reporting.reference_runs import write_reference

        show(*write_reference(_begun_runs(command), command.reference))
        return
    check_replaceable(_file(command), SIGN, "a report of report.py", "--output")  # never overwrite another file
    if command.watch:
        watch(partial(_begun_runs, command), partial(_write, command), command.every or LOOK_SECONDS)
    else:
        _write(command)


def _file(command: ReportCommand) -> Path:
    return command.output or (command.runs[0] if len(command.runs) == 1 else Path()) / REPORT


def _begun_runs(command: ReportCommand) -> list[Path]:
    """Return the runs to report on.

    A sweep, ladder, trial or archive is replaced by those of its runs that have begun. Any other path is a run.
    """
    from reporting.report_page import is_experiment

    runs: list[Path] = []
    for path in command.runs:
        runs_inside = [] if (path / METRICS).exists() else runs_in(path)
        runs += runs_inside or ([] if is_experiment(path) else [path])
    return list(dict.fromkeys(runs))


def _send(command: ReportCommand, name: str) -> None:
    from reporting.trackers.tracker_sync import TrackerSync

    runs = _begun_runs(command)
    syncs = [TrackerSync(run, name, command.project or PROJECT) for run in runs]

    def advance(*, last: bool = False) -> None:
        for run, sync in zip(runs, syncs, strict=True):
            new_steps, all_steps = sync.advance()
            if last:
                sync.close()  # raises an error if the tracker has not received everything
            show(f"{run}: {new_steps:,} new steps for {name}, {all_steps:,} in all")

    with ExitStack() as stack:
        for sync in syncs:
            stack.callback(sync.close)
        if command.watch:
            watch(lambda: runs, advance, command.every or LOOK_SECONDS)
        advance(last=True)


def _write(command: ReportCommand) -> None:
    """Write the page.

    If samples are missing, first write the page without them, because recording the samples of a large model takes
    minutes. Write the page again when the samples are recorded.
    """
    from reporting.report_page import experiment_results, report_page
    from reporting.run_history import NotBegun, read_history, run_names
    from reporting.samples.sample_log import has_missing_samples
    from reporting.samples.sample_sections import sample_sections

    runs, problems = _readable(command)
    results = {"Results": list(filter(None, map(experiment_results, command.runs)))}
    sampled = runs if len(runs) <= MOST_SAMPLED else []
    samples_missing = not command.no_samples and any(map(has_missing_samples, sampled))
    for record in (False, True) if samples_missing else (not command.no_samples,):
        named_runs = zip(runs, run_names(runs), strict=True)
        histories = [attrs.evolve(read_history(run), name=name) for run, name in named_runs]
        sections, notes = sample_sections(sampled, record=record)
        page = report_page(runs, histories, results | sections)
        with writing(_file(command)):
            replace_file(_file(command), page)
    notes = [*(notice for history in histories for notice in history.notes), *notes]
    notes += [note(f"left out: {problem}") for problem in problems if isinstance(problem, NotBegun)]
    show(*notes, f"report {_file(command)}")
    if damaged := [problem for problem in problems if not isinstance(problem, NotBegun)]:
        raise BadInput(*(f"left out of the page: {problem}" for problem in damaged))


def _readable(command: ReportCommand) -> tuple[list[Path], list[BadInput]]:
    """Return the runs that can be read, and the problems of the others. Raise BadInput if no run can be read."""
    from reporting.run_history import read_history

    runs: list[Path] = []
    problems: list[BadInput] = []
    for run in _begun_runs(command):
        try:
            read_history(run)
        except BadInput as problem:
            problems.append(problem)
        else:
            runs.append(run)
    if not runs and problems:
        raise problems[0]
    return runs, problems


def runs_in(folder: Path) -> list[Path]:
    """Return those runs in the folder of an experiment or archive that have begun.

    If a trial ended before its first pair of runs, it has only probe runs, and these are returned.
    """
    logs = sorted(folder.glob(f"*/{METRICS}")) or sorted(folder.glob(f"probes/*/{METRICS}"))
    return [log.parent for log in logs]


def watch(look: Callable[[], Sequence[Path]], write: Callable[[], None], every_seconds: float) -> None:
    """Call `write` now and whenever the runs that `look` returns have changed, until no job trains any of them.

    If no run has any measurements yet, wait for them while a job is running. If no job is running, the NotBegun error
    of `write` is raised.
    """
    from reporting.run_history import NotBegun

    reported_versions, idle_looks = None, 0
    while True:
        runs = look()
        # Check the lock before reading the files, so that the last lines of a job are not missed.
        idle_looks = 0 if any(map(is_locked, runs)) else idle_looks + 1
        versions = [_version(run) for run in runs]
        if versions != reported_versions:
            try:
                write()
            except NotBegun:
                if idle_looks >= IDLE_LOOKS:
                    raise
            else:
                reported_versions = versions
        if idle_looks >= IDLE_LOOKS:
            return
        time.sleep(every_seconds)


def _version(run: Path) -> list[object]:
    """Return a value that changes when a run has something new to report."""
    from tokens.format.token_file import version_of

    return [*(version_of(run / name) for name in (METRICS, EVALUATIONS, EXIT_FILE)), *steps_in(checkpoints_of(run))]


COMMANDS = {"": Command(ReportCommand, __name__)}
