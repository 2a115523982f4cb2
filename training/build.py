"""Builders: the network, its training state, step settings and training loop from a checked configuration."""

import threading

import attrs
import torch

from model.config import flops_per_token
from model.gpt import GPT, initialize
from model.loss import NextTokenLoss
from tokens.batches.micro_batches import Reading
from training.checkpoints.async_writer import Saver
from training.checkpoints.disk import checkpoints_of
from training.checkpoints.run_record import RunRecord
from training.command import Options
from training.config.batch_plan import VALIDATION_SHARE, Plan
from training.config.train_config import Run
from training.data.open_tokens import TokenSet, make_reading
from training.data.watch_tokens import TokenWatch
from training.exactness.attention_kernel import use_attention
from training.hardware.environment import peak_flops
from training.limits import Limits
from training.loop import Loop
from training.optimizer import Optimizer
from training.parallel.mesh import make_mesh
from training.parallel.process_group import Ranks
from training.parallel.wrap import Wrapping, parallelize
from training.planning.budget import expected_save_seconds
from training.precision import LossScale, Numerics
from training.prefetch import Feed
from training.saving import Saving
from training.spike_guard import Guard
from training.state import StepSettings, TrainState
from training.step_intervals import Intervals
from training.supervision.heartbeat import Heartbeat
from training.supervision.stop_request import StopRequest
from training.telemetry.chart import ChartProcess
from training.telemetry.progress_bar import ProgressBar
from training.telemetry.reporter import AnyReporter, Reporter, SilentReporter, SpeedMeter
from training.telemetry.time_ledger import TimeLedger
from training.telemetry.trackers import open_trackers
from training.validation import Validation


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


def make_intervals(run: Run, plan: Plan, options: Options) -> Intervals:
    """Return when this job logs, validates, saves and ends."""
    return Intervals(
        log=run.train.log_interval,
        checkpoint=run.train.checkpoints.checkpoint_interval,
        validation=run.train.validation.validation_interval,
        state_hash=options.hash_every,
        last_step=plan.steps if options.max_steps is None else min(plan.steps, options.max_steps),
    )


@attrs.frozen(kw_only=True)
class LoopBuilder:
    """Inputs of a job, made before the first step; `build` makes the loop of a training state."""

    run: Run
    plan: Plan
    token_set: TokenSet
    options: Options
    ledger: TimeLedger
    heartbeat: Heartbeat
    stop_asked: threading.Event  # set by a signal

    def build(self, state: TrainState, settings: StepSettings, record: RunRecord) -> Loop:
        """Return the training loop. Call it on every rank."""
        run, plan, ledger, ranks = self.run, self.plan, self.ledger, self.heartbeat.ranks
        intervals = make_intervals(run, plan, self.options)
        reading, validation = make_reading(run, plan, self.token_set), make_validation(run, plan, self.token_set)
        reporter = make_reporter(run, plan, ranks, ledger, state.position.step)
        storage = checkpoints_of(run.directory)
        saver = Saver(storage, run.train.checkpoints.keep_checkpoints, state, ranks, record)
        saving = Saving(saver, state, ledger, reporter, expected_save_seconds(run.model, state.optimizer.state_bytes))
        limits = Limits(
            budget=self.options.budget,
            ledger=ledger,
            state=state,
            intervals=intervals,
            saving=saving,
            validation_steps=validation_steps(plan),
        )
        return Loop(
            state=state,
            settings=settings,
            ranks=ranks,
            first_step=state.position.step,
            plan=plan,
            intervals=intervals,
            feed=make_feed(reading, state, ranks, intervals.last_step),
            token_watch=watch_tokens(reading, validation, self.token_set),
            validation=validation,
            saving=saving,
            ledger=ledger,
            reporter=reporter,
            heartbeat=self.heartbeat,
            limits=limits,
            stop_request=StopRequest(ranks, self.stop_asked, limits.reached),
            checkpoints=storage.where(""),
        )


def make_feed(reading: Reading, state: TrainState, ranks: Ranks, last_step: int) -> Feed:
    """Return the micro-batches of this rank, from where the state stands to the last step."""
    return Feed(reading, state.parallel.data_parallel.rank, ranks.device, range(state.position.step, last_step))


def make_validation(run: Run, plan: Plan, token_set: TokenSet) -> Validation | None:
    """Return the validation of a run, or None where it has none."""
    held_out = token_set.validation
    if held_out is None or held_out.validation is None:
        return None
    return Validation(held_out.validation, run.train.validation.start_val_token, plan.validation_sequences)


def watch_tokens(reading: Reading, validation: Validation | None, token_set: TokenSet) -> TokenWatch:
    """Watch the token files that a job reads."""
    streams = [source.stream for source in reading.sources]
    return TokenWatch(streams + ([] if validation is None else [validation.stream]), token_set.digests)


def validation_steps(plan: Plan) -> float:
    """Return how many training steps take as long as a validation, roughly: it has no backward pass."""
    return VALIDATION_SHARE * plan.validation_sequences * plan.layout.context_length / plan.tokens_per_step


def make_reporter(run: Run, plan: Plan, ranks: Ranks, ledger: TimeLedger, first_step: int) -> AnyReporter:
    """Return the reporter of this rank. Raises BadInput where the metrics log cannot be opened."""
    if not ranks.coordinates:
        return SilentReporter()
    peak = peak_flops(ranks.device)
    bar = ProgressBar(first_step, plan.steps)
    return Reporter(
        plan=plan,
        first_step=first_step,
        device=ranks.device,
        ledger=ledger,
        meter=SpeedMeter(
            ledger, plan.tokens_per_step, flops_per_token(run.model), None if peak is None else peak * ranks.world_size
        ),
        bar=bar,
        trackers=open_trackers(run.directory, bar.say),
        chart=ChartProcess(run.directory),
    )
