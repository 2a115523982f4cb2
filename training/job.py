"""Job: one launch of a run on this rank, in three phases: open the run, begin or resume it, run the loop."""

import platform
from collections import Counter
from contextlib import closing

import attrs
import torch

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED
from common.json_files import utc_now
from common.output import Notice, advisory, note, show, warning
from training.build import OpenJob, build_loop, make_feed, make_settings, make_state, open_job
from training.checkpoints.directory import checkpoints_of, name_of
from training.checkpoints.run_record import RunRecord, describe_changes, make_record, write_record
from training.command import Options
from training.exactness.fingerprint import agreed_fingerprint, resolve_numerics, set_determinism
from training.hardware.environment import device_name
from training.loop import Loop
from training.parallel.process_group import Ranks, from_coordinator, gather, stop
from training.precision import Numerics
from training.resume import ResumeRequest, resume
from training.run_checks import CheckedRun
from training.state import Position, StepSettings, TrainState
from training.supervision.supervision import Supervision, run_then
from training.telemetry.budget import expected_save_seconds
from training.telemetry.metrics_log import Detail, EarlyEnd, Metric, MetricsLog, RunEvent, read_counted
from training.telemetry.reporter import introduce, nothing_to_do, summarize
from training.telemetry.time_ledger import TimeLedger, read_earlier, table

CHANGE_RECORDED = (
    "the change is recorded in the run; to train from the start with the new values, use a new run directory or "
    "--resume never"
)


def run_job(checked: CheckedRun, options: Options, supervision: Supervision) -> int:
    """Train the run; return the exit status. Call it on every rank. Raises BadInput and Diverged."""
    run = checked.run
    with supervision.join(options.device, run.train.timeout_seconds, run.train.execution.tensor_parallel) as heartbeat:
        ledger = TimeLedger(options.began, options.price_per_hour)
        with ledger.start_up():
            job = open_job(checked, options, supervision, heartbeat, ledger)
            loop = None if options.replay else resume_job(job)
        if options.replay is not None:
            status = replay_job(job, *options.replay)
        else:
            status = EXIT_DONE if loop is None else run_loop(loop, job)
    stop()  # not called after an exception, because it could then wait for ranks that are still in a collective
    if options.then is not None:
        # This has an effect only if there was nothing left to train. Otherwise, the record has already been written.
        supervision.exit_record.write(status, "finished")
        run_then(options.then, run.directory, status, uploaded=job.uploader is None or not job.uploader.failed)
    return status


def resume_job(job: OpenJob) -> Loop | None:
    """Begin or resume the run; return its loop, or None if there is nothing left to do."""
    numerics, state = _make_state(job)
    bucket = None if job.uploader is None else job.uploader.bucket
    numerics_changes, record = resume(_request(job, numerics), state, job.ranks, job.disk, bucket)
    settings = make_settings(job.run.train, job.plan, numerics)
    job.supervision.run_lock.write_resumed()
    directory, position = job.run.directory, state.position
    if job.uploader is not None and position.step > 0:
        # An earlier job may have ended before it had uploaded this checkpoint.
        job.uploader.catch_up(checkpoints_of(directory) / name_of(position.step))
    job.ledger.earlier = from_coordinator(job.ranks, lambda: read_earlier(directory, position.elapsed_seconds))
    if job.intervals.is_done(position):
        out_of_patience = job.intervals.out_of_patience(position)
        lines: list[Notice | str] = [
            nothing_to_do(directory, job.plan.steps, position, out_of_patience=out_of_patience)
        ]
        lines += change_notes(record, position, "not recorded, because no step is left to train with the new values")
        show(*lines, once=True)
        if job.uploader is not None:
            job.uploader.finish(None)
            problems = [outcome.problem for outcome in job.uploader.ended() if outcome.problem is not None]
            show(*[warning(f"the run's last checkpoint is NOT UPLOADED: {line}") for line in problems], once=True)
        return None
    show(*change_notes(record, position, CHANGE_RECORDED), once=True)
    save_seconds = expected_save_seconds(job.run.model, state.optimizer.state_bytes)
    from_coordinator(job.ranks, lambda: job.options.budget.check_start(job.ledger, save_seconds))
    record = attrs.evolve(record, self_test=_test_determinism(state, settings, job))
    _write_record(job, record)
    job.supervision.training = True
    loop = build_loop(job, state, settings, record)
    _report_start(loop, job, record, numerics_changes)
    return loop


def change_notes(record: RunRecord, position: Position, consequence: str) -> list[Notice]:
    """Return notes about the settings that this job changes, each followed by the consequence of the change."""
    changes = [change for change in record.changes if change.step == position.step]
    return [note(f"{line}; {consequence}") for line in describe_changes(changes)]


def run_loop(loop: Loop, job: OpenJob) -> int:
    """Train, write the exit record, the time ledger and the last chart, and print the summary.

    Returns the exit status.
    """
    reporter, feed, summary = loop.reporter, loop.feed, []  # the summary stays empty after an exception
    try:
        with closing(feed), reporter.ledger.measure("training"):
            finished = loop.run_steps()
        status = EXIT_DONE if finished else EXIT_STOPPED
        # This comes before the chart, because drawing the chart may take longer than torchrun waits.
        job.supervision.exit_record.write(status, "finished" if finished else loop.stop_request.reason)
        loop.saving.finish_upload()
        with advisory("time ledger"):
            # This is recorded now for the report, and because the job may be killed before its end.
            preliminary_record = reporter.ledger.record(feed.waited_seconds)
            del preliminary_record[Metric.LEDGER]  # the ledger of this job is recorded when the job ends
            reporter.record(loop.state.position.step, preliminary_record)
        chart = reporter.finish()
        with advisory("summary"):
            out_of_patience = loop.intervals.out_of_patience(loop.state.position)
            stopped_by = (EarlyEnd.PATIENCE if out_of_patience else None) if finished else loop.stop_request.cause
            summary = summarize(job.run.directory, reporter, loop.state.position, stopped_by, chart)
    finally:
        with advisory("time ledger"):
            ledger_record = reporter.ledger.record(feed.waited_seconds)
            reporter.record(loop.state.position.step, {**ledger_record, "time": utc_now()})
            summary += table(ledger_record)
        reporter.close(summary)
    return status


def replay_job(job: OpenJob, first: int, last: int) -> int:
    """Train recorded steps again; return the exit status, which is 1 if a number differs from its record."""
    from training.replay.replay import load_before, read_recorded, replay

    recorded_steps = read_recorded(job.run.directory, (first, last), job.plan.steps)
    numerics, state = _make_state(job)
    load_before(first, _request(job, numerics), state, job.ranks)
    settings = make_settings(job.run.train, job.plan, numerics)
    _test_determinism(state, settings, job)
    with closing(make_feed(job, state, last)) as feed:
        return EXIT_DONE if replay(state, settings, job.ranks, feed.next, recorded_steps) else EXIT_ERROR


def _make_state(job: OpenJob) -> tuple[Numerics, TrainState]:
    """Resolve the numerical settings for this machine; return these and a state whose weights have no values yet."""
    run, plan, ranks = job.run, job.plan, job.ranks
    numerics = resolve_numerics(run.train, ranks.device)
    set_determinism(numerics.determinism, run.train.execution.cpu_threads, ranks)
    with advisory("introduction"):
        show(*introduce(run, plan, numerics, ranks), once=True)
    return numerics, make_state(run.model, run.train, plan, numerics, ranks)


def _request(job: OpenJob, numerics: Numerics) -> ResumeRequest:
    fingerprint = agreed_fingerprint(job.run.train, numerics, job.ranks)
    record = make_record(job.run, job.plan, job.token_set, fingerprint)
    # --resume applies only once. If torchrun restarts a job that has already resumed, the newest checkpoint is used.
    resumed = job.supervision.run_lock.resumed
    checkpoint = from_coordinator(job.ranks, lambda: "auto" if resumed else job.options.resume)
    _, tokenizer = job.token_set.tokenizer or (None, None)
    return ResumeRequest(
        job.run.directory, checkpoint, record, job.options.allow_numerics_drift, job.checked.initial, tokenizer
    )


def _test_determinism(state: TrainState, settings: StepSettings, job: OpenJob) -> dict[str, object] | None:
    """Return the outcome of the self-test, and print it; None if this job needs no self-test."""
    if not needs_self_test(settings, job.ranks):
        return None
    from training.replay.self_test import describe, self_test

    outcome = self_test(state, settings, job.ranks)
    show(describe(outcome, settings.numerics), once=True)
    return attrs.asdict(outcome)


def needs_self_test(settings: StepSettings, ranks: Ranks) -> bool:
    """Return whether gradients must repeat exactly but might not: on GPUs, unless determinism is off."""
    return ranks.device.type == "cuda" and settings.numerics.determinism != "off"


def _write_record(job: OpenJob, record: RunRecord) -> None:
    """Write resolved.json, and open the metrics log once; print a note if the log is damaged.

    Raises BadInput on every rank.
    """
    directory, price, ranks = job.run.directory, job.ledger.price_per_hour, job.ranks

    def write() -> list[Notice]:
        write_record(directory, record, job.token_set, ranks, price)
        MetricsLog(directory).close()
        return read_counted(directory).notes()

    show(*from_coordinator(ranks, write), once=True)


def _report_start(loop: Loop, job: OpenJob, record: RunRecord, numerics_changes: list[str]) -> None:
    step = loop.state.position.step
    if numerics_changes:
        loop.reporter.event(step, RunEvent.NUMERICS_DRIFT, **{Detail.CHANGES: numerics_changes})
    loop.reporter.event(
        step,
        RunEvent.START,
        **{
            Detail.WORLD_SIZE: job.ranks.world_size,
            Detail.DATA_PARALLEL_SIZE: job.ranks.data_parallel.size,
            Detail.DEVICES: dict(Counter(gather(job.ranks, device_name(job.ranks.device)))),
            Detail.SOFTWARE: f"torch {torch.__version__}, Python {platform.python_version()}",
            Detail.COMMIT: record.git_commit,
            Metric.PRICE_PER_HOUR: job.ledger.price_per_hour,
            Metric.ELAPSED_SECONDS: round(job.ledger.elapsed_seconds(), 3),
        },
    )
    if record.self_test is not None:
        loop.reporter.event(step, RunEvent.SELF_TEST, **record.self_test)
    for change in record.changes:
        if change.step == step:
            values = {Detail.KEY: change.key, Detail.OLD: change.old, Detail.NEW: change.new}
            loop.reporter.event(step, RunEvent.SETTINGS_CHANGED, **values)
