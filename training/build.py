"""Builders that turn a checked configuration into the opened job, its training state, step settings and loop."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import attrs
import torch

from common.output import show
from model.axes import axes_of
from model.config import ModelConfig
from model.counts import flops_per_token
from model.gpt import GPT
from model.loss import NextTokenLoss
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.run_record import RunRecord
from training.checkpoints.tensor_files import StateShard
from training.checkpoints.writer import CheckpointWriter
from training.command import Options
from training.config.batch_plan import VALIDATION_SHARE, Plan
from training.config.train_config import Run, TrainConfig
from training.data.open_tokens import TokenSet, make_reading, open_tokens
from training.data.verify_tokens import TokenWatch, verify_tokens
from training.guard import Guard
from training.hardware.environment import peak_flops
from training.loop import Intervals, Loop
from training.optimizer import Optimizer
from training.parallel.process_group import RankGroup, Ranks, gather, once_per_disk
from training.parallel.wrap import parallelize
from training.precision import LossScale, Numerics
from training.prefetch import Feed
from training.run_checks import CheckedRun
from training.saving import Saving
from training.state import StepSettings, TrainState
from training.supervision.heartbeat import Heartbeat
from training.supervision.stop_request import StopRequest
from training.supervision.supervision import Supervision
from training.telemetry.budget import expected_save_seconds
from training.telemetry.chart import BackgroundChart
from training.telemetry.metrics_log import REFERENCE, MetricsLog
from training.telemetry.reporter import ProgressBar, Reporter
from training.telemetry.time_ledger import TimeLedger
from training.validation import Validation

if TYPE_CHECKING:
    from training.checkpoints.bucket_upload import Uploader


@attrs.frozen(kw_only=True)
class OpenJob:
    """One launch of a run on this rank, after its files and tokens have been opened."""

    checked: CheckedRun
    options: Options
    supervision: Supervision
    heartbeat: Heartbeat
    ledger: TimeLedger
    disk: RankGroup  # the ranks that share this rank's run directory
    uploader: "Uploader | None"
    token_set: TokenSet
    plan: Plan

    @property
    def run(self) -> Run:
        return self.checked.run

    @property
    def ranks(self) -> Ranks:
        return self.heartbeat.ranks

    @property
    def intervals(self) -> Intervals:
        return make_intervals(self.run.train, self.plan, self.options)


def make_intervals(train: TrainConfig, plan: Plan, options: Options) -> Intervals:
    return Intervals(
        log=train.log_interval,
        checkpoint=train.checkpoints.checkpoint_interval,
        validation=train.validation.validation_interval,
        patience=train.validation.patience,
        state_hash=options.hash_every,
        last_step=plan.steps if options.max_steps is None else min(plan.steps, options.max_steps),
    )


def open_job(
    checked: CheckedRun, options: Options, supervision: Supervision, heartbeat: Heartbeat, ledger: TimeLedger
) -> OpenJob:
    """Lock the run directory on every disk, open the tokens unless they are open already, and verify them.

    Call it on every rank. Raises BadInput if any of this fails.
    """
    run, ranks, is_replay = checked.run, heartbeat.ranks, options.replay is not None
    disk = RankGroup(rank=ranks.rank, size=ranks.world_size)
    if ranks.node.size < ranks.world_size and not is_replay:
        from training.checkpoints.nodes.run_disk import find_disk

        disk = find_disk(run, ranks)
    if disk.size < ranks.world_size:
        once_per_disk(ranks, disk, lambda: supervision.lock_own_disk(run.directory))
    url, uploader = run.train.checkpoints.checkpoints, None
    if url is not None and not is_replay:
        from training.checkpoints.bucket_upload import Uploader

        uploader = Uploader(url, run, ranks)
    show(*run.notices, once=True)
    tokens = checked.tokens
    if tokens is None or not all(gather(ranks, tokens is not None)):
        tokens = open_tokens(run, options.token_files, ranks, follow=options.follow)
    return OpenJob(
        checked=checked,
        options=options,
        supervision=supervision,
        heartbeat=heartbeat,
        ledger=ledger,
        disk=disk,
        uploader=uploader,
        token_set=verify_tokens(run, tokens, ranks),
        plan=tokens.plan,
    )


def make_state(model: ModelConfig, train: TrainConfig, plan: Plan, numerics: Numerics, ranks: Ranks) -> TrainState:
    """Return the training state at step 0: the wrapped network and its optimizer. Call it on every rank.

    The weights are allocated but have no values yet.
    """
    # Matrix products that autocast leaves in fp32 may use TF32, unless the run's precision is fp32.
    torch.set_float32_matmul_precision("highest" if numerics.precision == "fp32" else "high")
    # On a CPU, there is no kernel to choose: torch has a single fused one, which it does not use with dropout.
    if ranks.device.type == "cuda":
        from training.exactness.attention_kernel import Shape, use_attention

        shape = Shape(model, train.batch.microbatch_size, numerics.precision, ranks.device)
        use_attention(shape, numerics.determinism, ranks, train.file.with_name("model.json"))
    recompute, chunks = train.memory.recompute_blocks, train.memory.loss_chunks
    with torch.device("meta"):  # parameters have shapes, but no memory
        network = NextTokenLoss(GPT(model), recompute_blocks=recompute, chunks=chunks)
    if train.execution.shards > 1:
        from training.parallel.tensor_shards import in_shards

        network = in_shards(network, train.execution.shards, ranks.tensor)
    parallel = parallelize(network, train.execution.parallel, numerics, plan.layout.microbatches, ranks)
    parameters = parallel.named_parameters()
    axes = {name: axes_of(name, model) for name in parameters}
    return TrainState(
        parallel=parallel,
        optimizer=Optimizer(parameters, axes, train.optimization, ranks.device, parallel.make_spread),
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


def make_feed(job: OpenJob, state: TrainState, last_step: int) -> Feed:
    """Return the feed of this rank's micro-batches, from the state's step to the last step."""
    reading = make_reading(job.run.train, job.plan, job.token_set, job.run.model.vocab_size)
    watch = TokenWatch(job.token_set.streams, job.token_set.digests)
    steps = range(state.position.step, last_step)
    return Feed(reading, state.parallel.data_parallel.rank, job.ranks.device, steps, watch)


def build_loop(job: OpenJob, state: TrainState, settings: StepSettings, record: RunRecord) -> Loop:
    """Build the training loop. Call it on every rank. Raises BadInput if the metrics log cannot be opened."""
    run, plan, intervals, peak = job.run, job.plan, job.intervals, peak_flops(job.ranks.device)
    bar = ProgressBar(state.position.step, plan.steps) if job.ranks.coordinates else None
    open_log: Callable[..., MetricsLog] = MetricsLog
    if (run.directory / REFERENCE).exists():
        from training.reference import ComparedLog

        open_log = partial(ComparedLog, compared=record)
    reporter = Reporter(
        plan=plan,
        device=job.ranks.device,
        ledger=job.ledger,
        peak_tokens=None if peak is None else peak * job.ranks.world_size / flops_per_token(run.model),
        bar=bar,
        metrics=None if bar is None else open_log(run.directory),
        chart=None if bar is None else BackgroundChart(run.directory),
    )
    windows = run.train.validation.start_val_token, plan.validation_sequences, run.model.context_length
    streams = {
        directory.dataset: directory.validation
        for directory in job.token_set.validated
        if directory.validation is not None
    }
    shard = StateShard(state, job.ranks, job.disk)
    writer = CheckpointWriter(checkpoints_of(run.directory), job.uploader, shard, record)
    saving = Saving(writer, state, reporter, expected_save_seconds(run.model, state.optimizer.state_bytes))
    stop_request = StopRequest(
        ranks=job.ranks,
        stop_requested=job.supervision.stop_requested,
        budget=job.options.budget,
        ledger=job.ledger,
        state=state,
        validation_due=intervals.validation_due,
        saving=saving,
        validation_steps=validation_steps(plan) * len(streams),
    )
    return Loop(
        state=state,
        settings=settings,
        intervals=intervals,
        feed=make_feed(job, state, intervals.last_step),
        validations={dataset: Validation(stream, *windows) for dataset, stream in streams.items()},
        saving=saving,
        reporter=reporter,
        heartbeat=job.heartbeat,
        stop_request=stop_request,
    )


def validation_steps(plan: Plan) -> float:
    """Estimate how many training steps take as long as one validation, which has no backward pass."""
    return VALIDATION_SHARE * plan.validation_sequences * plan.layout.context_length / plan.tokens_per_step
