"""Job: one launch of a run on this rank, from joining the process group to the closing summary."""

import math
from contextlib import closing
from pathlib import Path

import attrs
import torch

from common.clock import utc_now
from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, advisory
from training.build import LoopBuilder, make_network, make_settings, make_state
from training.checkpoints.bucket_upload import open_uploader
from training.checkpoints.directory import checkpoints_of, name_of
from training.checkpoints.node_disks import NodeDisks, find_disks
from training.checkpoints.run_record import RunRecord, make_record, write_record
from training.command import Options
from training.config.batch_plan import Plan, describe, make_plan
from training.config.learning_rates import describe_schedule, make_schedule
from training.config.train_config import Run
from training.data.open_tokens import TokenSet, open_tokens
from training.data.verify_tokens import verify_tokens
from training.exactness.fingerprint import agreed_fingerprint, resolve_numerics
from training.exactness.levels import set_determinism
from training.initial_weights import InitialWeights
from training.loop import Loop
from training.parallel.process_group import Ranks, from_coordinator, stop
from training.planning.budget import expected_save_seconds
from training.precision import Numerics
from training.replay import RecordedSteps, read_recorded, replay
from training.resume import Beginning, ResumeRequest, files_read_before, load_before, resume
from training.self_test import SelfTest, self_test
from training.self_test import describe as describe_outcome
from training.state import Position, StepSettings, TrainState
from training.supervision.heartbeat import Heartbeat
from training.supervision.supervision import Supervision
from training.telemetry.metrics_log import SETTINGS_CHANGED, MetricsLog, read_counted
from training.telemetry.progress_bar import duration
from training.telemetry.reporter import print_lines
from training.telemetry.time_ledger import TimeLedger, read_earlier, table


def run_job(run: Run, options: Options, supervision: Supervision, initial: InitialWeights | None) -> int:
    """Train the run, from random or other initial weights, and return the exit status.

    Call it on every rank. Raises BadInput and Diverged.
    """
    with supervision.join(options.device, run.train.timeout_seconds) as heartbeat:
        status = _train(run, options, supervision, heartbeat, initial)
    stop()  # not after an exception: to leave NCCL's group can wait for peers that are in a collective
    return status


def _train(
    run: Run, options: Options, supervision: Supervision, heartbeat: Heartbeat, initial: InitialWeights | None
) -> int:
    ranks, ledger = heartbeat.ranks, TimeLedger(options.began, options.price_per_hour)
    with ledger.start_up():
        disks = NodeDisks(ranks) if options.replay is not None else find_disks(run, ranks)
        if not disks.shared:
            disks.on_each(lambda: supervision.lock_own_disk(run.directory))
        uploader = None if options.replay is not None else open_uploader(run, disks)
        token_set, plan = _open_data(run, options, ranks)
        builder = LoopBuilder(
            run=run,
            plan=plan,
            token_set=token_set,
            options=options,
            ledger=ledger,
            heartbeat=heartbeat,
            disks=disks,
            uploader=uploader,
            stop_asked=supervision.stop_asked,
        )
        state, settings = _build_state(run, plan, ranks)
        record = make_record(run, plan, token_set, agreed_fingerprint(run.train, settings.numerics, ranks))
        # Where torchrun has restarted this job after it resumed, --resume is done.
        wanted = from_coordinator(ranks, lambda: "auto" if supervision.run_lock.resumed else options.resume)
        request = ResumeRequest(run.directory, wanted, record, options.allow_numerics_drift, initial)
        if options.replay is not None:
            return _replay(read_recorded(run.directory, options.replay, plan.steps), request, builder, state, settings)
        beginning = resume(request, state, disks, None if uploader is None else uploader.bucket)
        settings = _as_begun(settings, run, plan, beginning, ranks)
        supervision.run_lock.write_resumed()
        position = state.position
        if uploader is not None and position.step > 0:
            uploader.catch_up(checkpoints_of(run.directory) / name_of(position.step))
        ledger.add_earlier(from_coordinator(ranks, lambda: read_earlier(run.directory, position.elapsed_seconds)))
        # A stop may have cut the last validation short: the loop makes up for it.
        last_step = builder.intervals.last_step
        unvalidated = position.validation_loss is None and builder.intervals.validation_due(last_step)
        if position.step > last_step or (position.step == last_step and not unvalidated):
            print_lines(ranks, [_nothing_to_do(run.directory, plan, position)])
            if uploader is not None:
                uploader.finish(None)
                problems = [outcome.problem for outcome in uploader.ended() if outcome.problem is not None]
                print_lines(ranks, [f"WARNING: its last checkpoint is NOT UPLOADED: {line}" for line in problems])
            return EXIT_DONE
        save_seconds = expected_save_seconds(run.model, state.optimizer.state_bytes)
        from_coordinator(ranks, lambda: options.budget.check_start(ledger, save_seconds))
        outcome = _test_determinism(state, settings, ranks)
        tested = None if outcome is None else attrs.asdict(outcome)
        record = attrs.evolve(beginning.record, self_test=tested)
        from_coordinator(ranks, lambda: write_record(run.directory, record, token_set, ranks, ledger.price_per_hour))
        print_lines(ranks, from_coordinator(ranks, lambda: _check_metrics(run.directory)))
    supervision.begin_training()
    loop = builder.build(state, settings, record)
    _report_start(loop, record, beginning.numerics_changes)
    return _run(loop, run.directory, supervision)


def _open_data(run: Run, options: Options, ranks: Ranks) -> tuple[TokenSet, Plan]:
    """Open and check the tokens; return them with the plan that they allow."""
    print_lines(ranks, run.notices)
    before = from_coordinator(ranks, lambda: files_read_before(run.directory))
    token_set = open_tokens(run, options.token_files, ranks, follow=options.follow, begun_with=before)
    plan = make_plan(run.train, run.model.context_length, ranks.data_parallel.size, token_set.lengths)
    return verify_tokens(run.train, plan, token_set, ranks, run.model.vocab_size), plan


def _build_state(run: Run, plan: Plan, ranks: Ranks) -> tuple[TrainState, StepSettings]:
    """Resolve the numerics on this machine; return a state without weights and the step settings."""
    numerics = resolve_numerics(run.train, ranks.device)
    set_determinism(numerics.determinism, run.train.execution.cpu_threads, ranks)
    with advisory("introduction"):
        print_lines(ranks, _introduction(run, plan, numerics, ranks))
    state = make_state(make_network(run.model), run.train, plan, numerics, ranks)
    return state, make_settings(run.train, plan, numerics)


def _as_begun(settings: StepSettings, run: Run, plan: Plan, beginning: Beginning, ranks: Ranks) -> StepSettings:
    """Return the step settings with the rounding of the schedule's steps that the run began with."""
    schedule = make_schedule(run.train.optimization, plan.steps, exact=beginning.record.exact_percent)
    if schedule != settings.schedule:
        print_lines(ranks, [f"NOTE: the run keeps the schedule that it began with: {describe_schedule(schedule)}"])
    return attrs.evolve(settings, schedule=schedule)


def _replay(
    recorded: RecordedSteps, request: ResumeRequest, builder: LoopBuilder, state: TrainState, settings: StepSettings
) -> int:
    """Repeat recorded steps; return the exit status: 1 where a number differs from its record."""
    ranks = builder.heartbeat.ranks
    beginning = load_before(recorded.first, request, state, ranks)
    settings = _as_begun(settings, builder.run, builder.plan, beginning, ranks)
    _test_determinism(state, settings, ranks)
    with closing(builder.feed(state, recorded.last)) as feed:
        return EXIT_DONE if replay(state, settings, ranks, feed.next, recorded) else EXIT_ERROR


def _test_determinism(state: TrainState, settings: StepSettings, ranks: Ranks) -> SelfTest | None:
    """Run the self-test and print its outcome, if it has one here."""
    outcome = self_test(state, settings, ranks)
    print_lines(ranks, [] if outcome is None else [describe_outcome(outcome, settings.numerics)])
    return outcome


def _run(loop: Loop, directory: Path, supervision: Supervision) -> int:
    """Train; write exit record, time ledger and last drawings; print the summary. Return the exit status."""
    summary: list[str] = []  # none after an exception
    try:
        finished = loop.train()
        status = EXIT_DONE if finished else EXIT_STOPPED
        supervision.exit_record.write(status)  # before the drawings, which may take longer than torchrun waits
        loop.saving.finish_upload()
        with advisory("time ledger"):
            so_far = loop.ledger.record(loop.feed.waited_seconds)
            del so_far["ledger"]  # this job's follows at its end
            loop.reporter.record(loop.state.position.step, **so_far)  # for the report, and lest a kill now loses it
        drawn = loop.reporter.finish()
        with advisory("summary"):
            summary = _summary(loop, directory, finished=finished, drawn=drawn)
    finally:
        with advisory("time ledger"):
            ledger_record = loop.ledger.record(loop.feed.waited_seconds)
            loop.reporter.record(loop.state.position.step, **ledger_record, time=utc_now())
            summary += table(ledger_record)
        loop.reporter.close(summary)
    return status


def _report_start(loop: Loop, record: RunRecord, numerics_changes: list[str]) -> None:
    step = loop.state.position.step
    if numerics_changes:
        loop.reporter.event(step, "numerics-drift", changes=numerics_changes)
    loop.reporter.event(
        step,
        "start",
        world_size=loop.ranks.world_size,
        commit=record.git_commit,
        price_per_hour=loop.ledger.price_per_hour,
        elapsed_seconds=round(loop.ledger.elapsed_seconds(), 3),
    )
    if record.self_test is not None:
        loop.reporter.event(step, "self-test", **record.self_test)
    for change in record.changes:
        if change.step == step:
            loop.reporter.event(step, SETTINGS_CHANGED, key=change.key, old=change.old, new=change.new)


def _check_metrics(directory: Path) -> list[str]:
    """Return a line where metrics are damaged. Raises BadInput where none can be read or written."""
    MetricsLog(directory).close()
    return read_counted(directory).notes()


def _introduction(run: Run, plan: Plan, numerics: Numerics, ranks: Ranks) -> list[str]:
    compiled = {False: "not compiled", True: "compiled", "model": "compiled as one graph"}[numerics.compiled]
    name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    parallel = run.train.execution.parallel
    wrapper = parallel if ranks.world_size > 1 else "one process"
    settings = f"{wrapper}, {numerics.precision}, {compiled}, determinism {numerics.determinism}"
    lines = [f"{run.directory}: {ranks.world_size} x {name}, {settings}", *describe(run.model, run.train, plan)]
    visible = torch.cuda.device_count() if ranks.device.type == "cuda" else 0
    if visible > ranks.node.size:
        lines.append(
            f"WARNING: {visible - ranks.node.size} of this machine's {visible} GPUs are idle; "
            f"start with torchrun --nproc_per_node={visible}"
        )
    return lines


def _nothing_to_do(directory: Path, plan: Plan, position: Position) -> str:
    if position.step < plan.steps:
        return f"{directory}: at step {position.step:,} of {plan.steps:,}; --max-steps asks for no more"
    return f"{directory}: the run is complete: {plan.steps:,} steps{_best(position)}; start anew with --resume never"


def _summary(loop: Loop, directory: Path, *, finished: bool, drawn: list[str]) -> list[str]:
    position, plan, ledger = loop.state.position, loop.plan, loop.ledger
    tokens = ledger.steps * plan.tokens_per_step
    if position.step == plan.steps:
        done = "done"
    elif finished:
        done = "paused by --max-steps"
    else:
        limit = loop.limits.stopped_by(signalled=loop.stop_request.signalled)
        done = "stopped early; the same command continues"
        if limit != "signal":
            done = f"stopped early by {limit}; the same command with a larger {limit} continues"
    loss = loop.reporter.last_loss
    losses = ("" if math.isnan(loss) else f", train loss {loss:.4f}") + _best(position)
    return [
        f"{directory}: {done}: step {position.step:,} of {plan.steps:,}{losses}",
        *(
            "data: "
            + ("" if read["epochs"] is None else f"{read['epochs']:.2f} epochs, ")
            + f"{read['tokens']:,} tokens of {read['dataset']}"
            for read in plan.read_until(position.step)
        ),
        f"{tokens:,} tokens in {duration(ledger.process_seconds())}, "
        f"{tokens / ledger.training_seconds():,.0f} tokens/s while training",
        ", ".join([f"weights {directory / 'checkpoints' / 'latest'}", *drawn]),
    ]


def _best(position: Position) -> str:
    if position.best_validation_loss is None:
        return ""
    return f", best validation loss {position.best_validation_loss:.4f} at step {position.best_step:,}"
