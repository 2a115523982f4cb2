"""One process's part in a run: build every object from the checked configuration, train, say how it went."""

import math
import sys
import threading

import attrs
import torch

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, BadInput, printable
from model.gpt import GPT, initialize
from model.loss import NextTokenLoss
from training.checkpoints import archive
from training.checkpoints import directory as checkpoint
from training.checkpoints.compatibility import differences, numerics_drift
from training.checkpoints.disk import checkpoints_of
from training.checkpoints.run_record import make_record, write_record
from training.checkpoints.storage import Checkpoint
from training.config.batch_plan import Plan, check_steps, describe, make_plan
from training.config.train_config import Run
from training.data.open_tokens import TokenSet, make_reading, open_tokens
from training.data.verify_tokens import verify_tokens
from training.exactness.attention_kernel import use_attention
from training.exactness.fingerprint import agreed_fingerprint, resolve_numerics
from training.exactness.levels import set_determinism
from training.hardware.preflight import check_compiler
from training.job import Job
from training.loop import Loop
from training.optimizer import Optimizer
from training.options import Options
from training.parallel.mesh import make_mesh
from training.parallel.process_group import Ranks, from_coordinator, stop, together
from training.parallel.wrap import Wrapping, parallelize
from training.planning.budget import expected_save_seconds
from training.precision import LossScale, Numerics
from training.replay import replay
from training.self_test import self_test
from training.spike_guard import Guard
from training.state import Position, StepSettings, TrainState
from training.supervision.heartbeat import Heartbeat
from training.supervision.supervision import Supervision
from training.telemetry.chart import CHART
from training.telemetry.metrics_log import METRICS, MetricsLog, count_unreadable
from training.telemetry.progress_bar import duration
from training.telemetry.time_ledger import TimeLedger, read_earlier, table
from training.validation import Validation


def run_session(run: Run, options: Options, supervision: Supervision) -> int:
    """Train the run and return the exit status. Call it on every rank. Raises BadInput and Diverged."""
    ledger = TimeLedger(options.began, options.price_per_hour)
    with supervision.join(options.device, run.train.timeout_seconds) as heartbeat:
        status = _train(run, options, ledger, supervision, heartbeat)
    stop()  # not after an exception: to leave NCCL's group can wait for peers that are in a collective
    return status


def _train(run: Run, options: Options, ledger: TimeLedger, supervision: Supervision, heartbeat: Heartbeat) -> int:
    ranks = heartbeat.ranks
    with ledger.start_up():
        _say(ranks, list(run.notices))
        if ranks.device.type == "cuda" and run.train.execution.compile is not False:
            together(ranks, check_compiler)
        token_set = open_tokens(run, options.token_files, ranks, follow=options.follow)
        plan = make_plan(run, ranks.world_size, token_set.lengths)
        check_steps(run, plan)
        token_set = verify_tokens(run, plan, token_set, ranks)
        numerics = resolve_numerics(run, plan, ranks)
        set_determinism(numerics.determinism, run.train.execution.cpu_threads, ranks)
        _say(ranks, _introduction(run, plan, numerics, ranks))
        state = make_state(make_network(run), run, plan, numerics, ranks)
        settings = make_settings(run, plan, numerics)
        job = _make_job(run, plan, token_set, numerics, ranks, options, supervision.stop_asked)
        if options.replay is not None:
            return _replay(job, options, state, settings, ranks)
        if from_coordinator(ranks, lambda: supervision.run_lock.resumed):
            options = attrs.evolve(
                options, resume="auto"
            )  # this job has done what --resume asks; torchrun restarted it
        changes = _resume(job, options, state, ranks)
        supervision.run_lock.write_resumed()
        ledger.earlier = from_coordinator(ranks, lambda: read_earlier(run.directory, state.position.elapsed_seconds))
        if state.position.step >= job.last_step:
            _say(ranks, [_nothing_to_do(run, plan, state.position)])
            return EXIT_DONE
        from_coordinator(
            ranks,
            lambda: options.budget.check_start(ledger, expected_save_seconds(run.model, state.optimizer.state_bytes)),
        )
        outcome, lines = self_test(state, settings, ranks)
        _say(ranks, lines)
        job = attrs.evolve(job, config=attrs.evolve(job.config, self_test=outcome))
        from_coordinator(ranks, lambda: write_record(run.directory, job.config, token_set, ranks, job.price_per_hour))
        _say(ranks, from_coordinator(ranks, lambda: _check_metrics(run)))
    supervision.begin_training()
    loop = Loop(state, settings, heartbeat, job, ledger)
    finished, drawn = None, False
    try:
        finished = loop.train(changes)
        status = EXIT_DONE if finished else EXIT_STOPPED
        supervision.exit_record.write(status)  # the chart may take longer than torchrun waits
        if loop.chart is not None:
            drawn = loop.chart.finish()
    finally:
        record = loop.close()
        _say(ranks, [*([] if finished is None else _summary(loop, finished, drawn)), *table(record)])
    return status


def _check_metrics(run: Run) -> list[str]:
    """Return a line where lines of the metrics are unreadable. Raises BadInput where none can be read or written."""
    MetricsLog(run.directory).close()
    count = count_unreadable(run.directory)
    where = run.directory / METRICS
    return [f"NOTE: {where}: {count:,} unreadable lines, torn by a kill or damaged, are left out"] if count else []


def _introduction(run: Run, plan: Plan, numerics: Numerics, ranks: Ranks) -> list[str]:
    compiled = {False: "not compiled", True: "compiled", "model": "compiled as one graph"}[numerics.compiled]
    name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    parallel = run.train.execution.parallel
    wrapper = parallel if ranks.world_size > 1 or parallel == "fsdp" else "one process"
    how = f"{wrapper}, {numerics.precision}, {compiled}, determinism {numerics.determinism}"
    lines = [f"{run.directory}: {ranks.world_size} x {name}, {how}", *describe(run, plan)]
    visible = torch.cuda.device_count() if ranks.device.type == "cuda" else 0
    if visible > ranks.local_world_size:
        lines.append(
            f"WARNING: {visible - ranks.local_world_size} of this machine's {visible} GPUs stand idle; "
            f"start with torchrun --nproc_per_node={visible}"
        )
    return lines


def make_network(run: Run) -> GPT:
    """Return the initialized network of a run, on the CPU."""
    network = GPT(run.model)
    initialize(network, run.train.random_seed)
    return network


def make_state(network: GPT, run: Run, plan: Plan, numerics: Numerics, ranks: Ranks) -> TrainState:
    """Wrap a network for all ranks; return it with its optimizer at step 0. Call it on every rank."""
    # Matrix products that autocast leaves in fp32 may use TF32; a run that asks for fp32 gets fp32.
    torch.set_float32_matmul_precision("highest" if numerics.precision == "fp32" else "high")
    use_attention(run, numerics, ranks)
    wrapping = Wrapping(kind=run.train.execution.parallel, compiled=numerics.compiled, determinism=numerics.determinism)
    recompute, chunks = run.train.memory.recompute_blocks, run.train.memory.loss_chunks
    model = NextTokenLoss(network.to(ranks.device), recompute_blocks=recompute, chunks=chunks)
    parallel = parallelize(model, wrapping, plan.layout.accumulation, make_mesh(ranks.device))
    return TrainState(
        parallel=parallel,
        optimizer=Optimizer(parallel.named_parameters(), run.train.optimization, ranks.device),
        loss_scale=LossScale(numerics.precision, ranks.device),
        guard=Guard(ranks, run.train.spikes),
    )


def make_settings(run: Run, plan: Plan, numerics: Numerics) -> StepSettings:
    """Return the settings of every step of a run."""
    return StepSettings(
        layout=plan.layout,
        schedule=plan.schedule,
        numerics=numerics,
        drop_rate=run.model.drop_rate,
        seed=run.train.random_seed,
        clipping_max_norm=run.train.optimization.clipping_max_norm,
    )


def _resume(job: Job, options: Options, state: TrainState, ranks: Ranks) -> list[str]:
    """Load the wanted checkpoint, if there is one, into the state; return how the run's numerics changed since."""
    directory, wanted = job.run.directory, options.resume
    _say(ranks, from_coordinator(ranks, lambda: archive.restore(directory)))
    found = None
    if wanted == "never":
        archived = from_coordinator(ranks, lambda: archive.archive_all(directory))
        if archived is not None:
            _say(ranks, [f"--resume never: what earlier runs wrote is now in {archived}"])
    else:
        found = from_coordinator(ranks, lambda: checkpoint.find(checkpoints_of(directory), wanted))
    if found is None:
        return []
    changes = _load(found, job, state, ranks, allow_drift=options.allow_numerics_drift)
    # What lies after it is damaged, or another branch now.
    archived = from_coordinator(ranks, lambda: archive.archive_after(directory, found))
    if archived is not None:
        _say(ranks, [f"--resume {wanted}: later checkpoints are now in {archived}"])
    _say(ranks, [f"resuming from {found} at step {state.position.step:,} of {job.plan.steps:,}"])
    return changes


def _load(found: Checkpoint, job: Job, state: TrainState, ranks: Ranks, *, allow_drift: bool) -> list[str]:
    """Load a checkpoint after saying what changed since; return how the run's numerics changed."""
    before = checkpoint.read_state(found).config
    _say(ranks, differences(job.run.directory, before, job.config, found))
    changes = numerics_drift(before, job.config, found, allowed=allow_drift)
    _say(ranks, [f"WARNING: numerics changed since {found.name}: {change}" for change in changes])
    checkpoint.load(found, state)
    return changes


def _replay(job: Job, options: Options, state: TrainState, settings: StepSettings, ranks: Ranks) -> int:
    """Run the asked steps again beside the record; return the exit status: 1 where a number differs."""
    assert options.replay is not None
    first, last = options.replay
    if not 1 <= first <= last <= job.plan.steps:
        raise BadInput(f"--replay {first} {last}: wanted steps from 1 to {job.plan.steps}, the first one first")
    directory = job.run.directory
    found = from_coordinator(ranks, lambda: checkpoint.find_before(checkpoints_of(directory), first))
    if found is not None:
        _load(found, job, state, ranks, allow_drift=True)
    _say(ranks, [f"replaying from {found or 'the start'} at step {state.position.step:,}; nothing is written"])
    _say(ranks, self_test(state, settings, ranks)[1])
    return EXIT_DONE if replay(state, settings, ranks, job, (first, last)) else EXIT_ERROR


def _make_job(  # noqa: PLR0913, PLR0917
    run: Run,
    plan: Plan,
    token_set: TokenSet,
    numerics: Numerics,
    ranks: Ranks,
    options: Options,
    stop_asked: threading.Event,
) -> Job:
    validation, held_out = None, token_set.validation
    if held_out is not None and held_out.validation is not None:
        validation = Validation(held_out.validation, run.train.validation.start_val_token, plan.validation_sequences)
    return Job(
        run=run,
        plan=plan,
        reading=make_reading(run, plan, token_set),
        validation=validation,
        stop_asked=stop_asked,
        last_step=plan.steps if options.max_steps is None else min(plan.steps, options.max_steps),
        price_per_hour=options.price_per_hour,
        budget=options.budget,
        hash_every=options.hash_every,
        token_digests=token_set.digests,
        config=make_record(run, plan, token_set, agreed_fingerprint(run, numerics, ranks)),
    )


def _nothing_to_do(run: Run, plan: Plan, position: Position) -> str:
    if position.step < plan.steps:
        return f"{run.directory}: at step {position.step:,} of {plan.steps:,}; --max-steps asks for no more"
    return (
        f"{run.directory}: the run is complete: {plan.steps:,} steps{_best(position)}; start anew with --resume never"
    )


def _summary(loop: Loop, finished: bool, drawn: bool) -> list[str]:
    position, ledger, job = loop.state.position, loop.ledger, loop.job
    tokens = (position.step - loop.first_step) * job.plan.tokens_per_step
    if position.step == job.plan.steps:
        done = "done"
    else:
        done = "paused by --max-steps" if finished else _stopped(loop.stopped_by())
    directory = job.run.directory
    losses = ("" if math.isnan(loop.last_loss) else f", train loss {loop.last_loss:.4f}") + _best(position)
    return [
        f"{directory}: {done}: step {position.step:,} of {job.plan.steps:,}{losses}",
        *_data_lines(job.plan, position.step),
        f"{tokens:,} tokens in {duration(ledger.process_seconds())}, "
        f"{tokens / ledger.training_seconds():,.0f} tokens/s while training",
        f"weights {directory / 'checkpoints' / 'latest'}, " + (f"chart {directory / CHART}" if drawn else "no chart"),
    ]


def _stopped(by: str) -> str:
    if by == "signal":
        return "stopped early; the same command continues"
    return f"stopped early by {by}; the same command with a larger {by} continues"


def _data_lines(plan: Plan, step: int) -> list[str]:
    return [
        "data: "
        + ("" if read["epochs"] is None else f"{read['epochs']:.2f} epochs, ")
        + f"{read['tokens']:,} tokens of {read['dataset']}"
        for read in plan.read_until(step)
    ]


def _best(position: Position) -> str:
    if position.best_validation_loss is None:
        return ""
    return f", best validation loss {position.best_validation_loss:.4f} at step {position.best_step:,}"


def _say(ranks: Ranks, lines: list[str]) -> None:
    if ranks.coordinates:
        for line in lines:
            print(printable(line), file=sys.stderr if line.startswith("WARNING") else sys.stdout, flush=True)
