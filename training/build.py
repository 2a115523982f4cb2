"""Builders: the network, its training state, step settings and training loop from a checked configuration."""

import threading

import attrs
import torch

from model.axes import axes_of
from model.config import ModelConfig, flops_per_token
from model.gpt import GPT
from model.loss import NextTokenLoss
from training.checkpoints.async_writer import Destination, Saver
from training.checkpoints.bucket_upload import Uploader
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.node_disks import NodeDisks
from training.checkpoints.run_record import RunRecord
from training.command import Options
from training.config.batch_plan import VALIDATION_SHARE, Plan
from training.config.train_config import Run, TrainConfig
from training.data.open_tokens import TokenSet, make_reading
from training.data.watch_tokens import TokenWatch
from training.exactness.attention_kernel import Shape, use_attention
from training.guard import Guard
from training.hardware.environment import peak_flops
from training.limits import Limits
from training.loop import Loop
from training.optimizer import Optimizer
from training.parallel.process_group import Ranks
from training.parallel.wrap import parallelize
from training.planning.budget import expected_save_seconds
from training.precision import LossScale, Numerics
from training.prefetch import Feed
from training.saving import Saving
from training.state import StepSettings, TrainState
from training.step_intervals import Intervals
from training.supervision.heartbeat import Heartbeat
from training.supervision.stop_request import StopRequest
from training.telemetry.background_drawing import ROOT, BackgroundDrawing
from training.telemetry.chart import background_chart
from training.telemetry.metrics_log import REPORT, MetricsLog
from training.telemetry.progress_bar import ProgressBar
from training.telemetry.reporter import Reporter
from training.telemetry.time_ledger import TimeLedger
from training.validation import Validation

REPORT_SECONDS = 60.0  # longest wait for the last report, whose samples take as long as this with GPT-2 124M


def make_network(model: ModelConfig) -> GPT:
    """Return a network on the meta device: shapes without memory."""
    with torch.device("meta"):
        return GPT(model)


def make_state(network: GPT, train: TrainConfig, plan: Plan, numerics: Numerics, ranks: Ranks) -> TrainState:
    """Wrap a network for all ranks; return it with its optimizer, before step 0. Call it on every rank.

    The weights of a network on the meta device have no values yet: see training/initial_weights.py.
    """
    # Matrix products that autocast leaves in fp32 may use TF32; a run that asks for fp32 gets fp32.
    torch.set_float32_matmul_precision("highest" if numerics.precision == "fp32" else "high")
    shape = Shape(network.config, train.batch.microbatch_size, numerics.precision, ranks.device)
    use_attention(shape, numerics.determinism, ranks, train.file.with_name("model.json"))
    recompute, chunks = train.memory.recompute_blocks, train.memory.loss_chunks
    model = NextTokenLoss(network, recompute_blocks=recompute, chunks=chunks)
    parallel = parallelize(model, train.execution.parallel, numerics, plan.layout.microbatches, ranks)
    parameters = parallel.named_parameters()
    axes = {name: axes_of(name, network.config) for name in parameters}
    return TrainState(
        parallel=parallel,
        optimizer=Optimizer(parameters, axes, train.optimization, ranks.device, parallel.updating),
        loss_scale=LossScale(numerics.precision, ranks.device),
        guard=Guard(ranks),
    )


def make_settings(train: TrainConfig, plan: Plan, numerics: Numerics) -> StepSettings:
    return StepSettings(
        layout=plan.layout,
        schedule=plan.schedule,
        numerics=numerics,
        seed=train.random_seed,
        clipping_max_norm=train.optimization.clipping_max_norm,
    )


def make_intervals(train: TrainConfig, plan: Plan, options: Options) -> Intervals:
    """Return when this job logs, validates, saves and ends."""
    return Intervals(
        log=train.log_interval,
        checkpoint=train.checkpoints.checkpoint_interval,
        validation=train.validation.validation_interval,
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
    disks: NodeDisks
    uploader: Uploader | None
    stop_asked: threading.Event  # set by a signal

    def build(self, state: TrainState, settings: StepSettings, record: RunRecord) -> Loop:
        """Return the training loop. Call it on every rank."""
        run, plan, ledger, ranks = self.run, self.plan, self.ledger, self.heartbeat.ranks
        intervals = self.intervals
        reporter = self._reporter(ranks, state.position.step, record)
        directory, validations = checkpoints_of(run.directory), self._validations()
        destination = Destination(directory, run.train.checkpoints.keep_checkpoints, self.uploader)
        saver = Saver(destination, state, self.disks, record)
        saving = Saving(saver, state, ledger, reporter, expected_save_seconds(run.model, state.optimizer.state_bytes))
        limits = Limits(
            budget=self.options.budget,
            ledger=ledger,
            state=state,
            intervals=intervals,
            saving=saving,
            validation_steps=validation_steps(plan) * len(validations),
        )
        return Loop(
            state=state,
            settings=settings,
            ranks=ranks,
            plan=plan,
            intervals=intervals,
            feed=self.feed(state, intervals.last_step),
            token_watch=TokenWatch(self.token_set.streams, self.token_set.digests),
            validations=validations,
            saving=saving,
            ledger=ledger,
            reporter=reporter,
            heartbeat=self.heartbeat,
            limits=limits,
            stop_request=StopRequest(ranks, self.stop_asked, limits.reached),
            checkpoints=str(directory),
        )

    @property
    def intervals(self) -> Intervals:
        """When this job logs, validates, saves and ends."""
        return make_intervals(self.run.train, self.plan, self.options)

    def feed(self, state: TrainState, last_step: int) -> Feed:
        """Return the micro-batches of this rank, from where the state stands to the last step."""
        reading = make_reading(self.run.train, self.plan, self.token_set, self.run.model.vocab_size)
        rank, device = state.parallel.data_parallel.rank, self.heartbeat.ranks.device
        return Feed(reading, rank, device, range(state.position.step, last_step))

    def _validations(self) -> dict[str, Validation]:
        """Return the validation on each dataset that has tokens for it, in the order of train.json."""
        start, sequences = self.run.train.validation.start_val_token, self.plan.validation_sequences
        streams = {each.dataset: each.validation for each in self.token_set.validated if each.validation is not None}
        return {dataset: Validation(stream, start, sequences) for dataset, stream in streams.items()}

    def _reporter(self, ranks: Ranks, first_step: int, record: RunRecord) -> Reporter:
        """Return this rank's reporter. Raises BadInput where the metrics log cannot be opened."""
        peak = peak_flops(ranks.device)
        bar = ProgressBar(first_step, self.plan.steps) if ranks.coordinates else None
        return Reporter(
            plan=self.plan,
            device=ranks.device,
            ledger=self.ledger,
            flops_per_token=flops_per_token(self.run.model),
            peak_flops=None if peak is None else peak * ranks.world_size,
            bar=bar,
            metrics=None if bar is None else MetricsLog(self.run.directory, bar.say),
            drawings=[] if bar is None else self._drawings(),
        )

    def _drawings(self) -> list[BackgroundDrawing]:
        drawings, every = [background_chart(self.run.directory)], self.options.report_every
        if every is not None:
            drawings.append(
                BackgroundDrawing(
                    name="report",
                    file=self.run.directory / REPORT,
                    arguments=[str(ROOT / "report.py"), str(self.run.directory.resolve())],
                    every_steps=every,
                    finish_seconds=REPORT_SECONDS,
                )
            )
        return drawings


def validation_steps(plan: Plan) -> float:
    """Return how many training steps take as long as a validation, roughly: it has no backward pass."""
    return VALIDATION_SHARE * plan.validation_sequences * plan.layout.context_length / plan.tokens_per_step
