"""The batch plan of a run: batches, steps, tokens, epochs and FLOPs, calculated from configuration and world size."""

import math
from collections.abc import Mapping
from typing import Any

import attrs

from common.errors import BadInput, Problem
from model.config import ModelConfig
from model.counts import flops_per_token, parameter_count
from tokens.batches.mixture import Mixture, Stage
from tokens.batches.sampling import Layout, balance, longest_share, window_count
from training.config.dataset_config import shares
from training.config.optimization import describe_group_rates, describe_optimizer, describe_schedule, make_schedule
from training.config.train_config import TrainConfig
from training.schedule import Schedule

MOST_SEQUENCES = 1 << 30  # largest number of sequences in a global batch
NEARLY_BEST = 0.9  # a micro-batch size is acceptable if its balance is at least this fraction of the best balance
DIVISORS_SHOWN = 24
MOST_STEPS = 99_999_999  # the step in a checkpoint's name has eight digits
# Time to validate a token, relative to the time to train on a token. Validation has only a forward pass.
VALIDATION_SHARE = 1 / 3


@attrs.frozen
class SourcePlan:
    """The part of a dataset that a run reads."""

    dataset: str
    windows: int | None  # windows in one epoch; None if the token files are not available
    sequences: int  # windows that the run reads; a window that is read twice counts twice

    def epochs(self, sequences: int) -> float | None:
        """Convert a number of windows to epochs. Return None if the length of an epoch is not known."""
        if sequences == 0:
            return 0.0
        return None if self.windows is None else sequences / self.windows


@attrs.frozen(kw_only=True)
class Plan:
    """The sizes of a run at a given world size: its batches, steps and datasets."""

    layout: Layout
    steps: int
    mixture: Mixture
    sources: tuple[SourcePlan, ...]
    schedule: Schedule
    validation_sequences: int  # sequences per validation, on all ranks together; 0 without validation

    @property
    def tokens_per_step(self) -> int:
        return self.layout.global_batch_size * self.layout.context_length

    @property
    def train_tokens(self) -> int:
        return self.steps * self.tokens_per_step

    def read_until(self, step: int) -> list[dict[str, Any]]:
        """Return the tokens and epochs that the first `step` steps read from each dataset."""
        counts = self.mixture.counts(step * self.layout.global_batch_size)
        return [
            {"dataset": source.dataset, "tokens": count * self.layout.context_length, "epochs": source.epochs(count)}
            for source, count in zip(self.sources, counts, strict=True)
        ]


def make_plan(
    train: TrainConfig, context_length: int, world_size: int, lengths: Mapping[str, int | None] | None = None
) -> Plan:
    """Return the plan of a run: layout, steps, mixture and schedule.

    `lengths` maps the name of each dataset, in order, to the number of tokens in its train stream, or to None if that
    number is not known. Raises BadInput if

    - the global batch cannot be distributed over the ranks (`derive_layout`);
    - `min_train_tokens` is null, and the stream's length is not known or too short for one step;
    - the run has more steps than a checkpoint's name can hold;
    - the run needs more than `max_epochs` of a dataset.
    """
    layout, data = derive_layout(train, context_length, world_size), train.data
    batch = layout.global_batch_size
    if lengths is None:
        lengths = dict.fromkeys(part.dataset for part in data.parts)
    windows = {
        name: None if tokens is None else window_count(tokens, data.start_train_token, context_length)
        for name, tokens in lengths.items()
    }
    steps = _count_steps(train, layout, lengths, windows)
    stages = [Stage(first_step * batch, share) for first_step, share in shares(data.parts) if first_step < steps]
    mixture = Mixture(stages)
    counts = mixture.counts(steps * batch)
    sources = tuple(SourcePlan(name, windows[name], count) for name, count in zip(lengths, counts, strict=True))
    for source in sources:
        _check_epochs(train, source)
    return Plan(
        layout=layout,
        steps=steps,
        mixture=mixture,
        sources=sources,
        schedule=make_schedule(train.optimization, steps),
        validation_sequences=train.validation.validation_sequences if train.validation.validation_interval else 0,
    )


def derive_layout(train: TrainConfig, context_length: int, world_size: int) -> Layout:
    """Return how the global batch is distributed over the ranks.

    Raises BadInput if this is not possible with the given world size.
    """
    batch, size = train.batch.global_batch_size, train.batch.microbatch_size
    accumulation, tensor_size = train.batch.gradient_accumulation_steps, train.execution.tensor_parallel
    if world_size % tensor_size:
        expected = f"a divisor of world size {world_size}"
        raise BadInput(train.located(Problem(key="tensor_parallel", found=str(tensor_size), expected=expected)))
    ranks = world_size // tensor_size
    microbatches = (accumulation or 1) * ranks if batch is None else batch // size
    layout = Layout(
        context_length=context_length, microbatch_size=size, microbatches=microbatches, data_parallel_size=ranks
    )
    keys: dict[str, Any] = {"key": "global_batch_size", "other_keys": ("microbatch_size",)}
    division = f"global_batch_size {batch} is {microbatches} micro-batches of {size}"
    if microbatches < ranks:
        smaller = microbatch_sizes(layout.global_batch_size, ranks)
        advice = f", or set microbatch_size to {smaller[-1]}" if smaller else ""
        advice = f"start at most {microbatches * tensor_size} ranks{advice}"
        problem = f"{division}, too few for world size {world_size}"
        raise BadInput(train.located(Problem(text=problem, advice=advice, **keys)))
    if train.execution.determinism == "run" and microbatches % ranks:
        divisors = [tensor_size * divisor for divisor in microbatch_sizes(microbatches, 1)]
        nearest = sorted(sorted(divisors, key=lambda divisor: abs(divisor - world_size))[:DIVISORS_SHOWN])
        required = 'but determinism "run" requires an equal number on every rank'
        problem = f"{division}, {required}, which world size {world_size} does not allow"
        examples = ", ".join(map(str, nearest))
        advice = f'set determinism to "elastic", or use another world size, such as {examples}'
        keys["other_keys"] += ("determinism",)
        raise BadInput(train.located(Problem(text=problem, advice=advice, **keys)))
    if batch is not None and accumulation not in (None, layout.accumulation):
        key, derived = "gradient_accumulation_steps", f"global_batch_size {batch} requires {layout.accumulation}"
        raise BadInput(
            train.located(
                Problem(
                    key=key,
                    text=f"{key}: got {accumulation}, but {derived} on world size {world_size}",
                    advice="leave the key out, so that it is derived",
                    other_keys=("global_batch_size",),
                )
            )
        )
    return layout


def count_due(first: int, last: int, *intervals: int) -> int:
    """Count the steps from `first` to `last`, inclusive, at which a periodic task is due.

    The task is due at the last step and at every multiple of its interval. If it has two intervals, a multiple of
    either one is enough.
    """
    assert 1 <= first <= last + 1
    multiples = sum(last // interval - (first - 1) // interval for interval in intervals)
    if len(intervals) > 1:
        multiples -= count_due(first, last, math.lcm(*intervals)) - (last % math.lcm(*intervals) > 0)
    return multiples + all(last % interval for interval in intervals)


def microbatch_sizes(batch: int, ranks: int, largest: int = MOST_SEQUENCES) -> list[int]:
    """Return the micro-batch sizes, up to `largest`, that divide a batch evenly or almost evenly over the ranks.

    They are in ascending order.
    """
    share = batch // ranks if batch % ranks == 0 else batch
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    sizes = {size for size in (*small, *(share // size for size in small)) if size * ranks <= batch}
    balances = {size: balance(batch // size, ranks) for size in sizes}
    least_balance = NEARLY_BEST * max(balances.values(), default=1)
    return sorted(size for size in sizes if size <= largest and balances[size] >= least_balance)


def factors(layout: Layout, tensor_size: int) -> str:
    """Return the factors of a global batch as a string. Groups of `tensor_size` ranks read the same sequences."""
    size, ranks = layout.microbatch_size, f"world size {tensor_size * layout.data_parallel_size}"
    ranks += f" / tensor_parallel {tensor_size}" if tensor_size > 1 else ""
    if layout.even:
        return f"micro-batch {size} x accumulation {layout.accumulation} x {ranks}"
    return f"{layout.microbatches} micro-batches of {size} on {ranks}"


def describe_balance(layout: Layout) -> list[str]:
    """Return a list with one line about the load of the ranks, and about a better micro-batch size if there is one.

    The list is empty if all ranks have the same amount of work.
    """
    if layout.even:
        return []
    ranks, count, most = layout.data_parallel_size, layout.microbatches, layout.accumulation
    utilization = balance(count, ranks)
    parts = [f"{count} micro-batches on {ranks} ranks: at most {most} each, {utilization:.0%} of the ranks' time used"]
    if (fewer := longest_share(count, most)) < ranks:
        parts.append(f"{fewer} ranks would be as fast")
    sizes = microbatch_sizes(layout.global_batch_size, ranks, layout.microbatch_size - 1)
    if sizes and (better := balance(layout.global_batch_size // sizes[-1], ranks)) > utilization:
        parts.append(f"microbatch_size {sizes[-1]} would use {better:.0%}")
    return ["; ".join(parts)]


def describe(model: ModelConfig, train: TrainConfig, plan: Plan) -> list[str]:
    """Return the lines that describe a run, one topic per line. They are printed before the run starts."""
    layout, sequences, flops = plan.layout, plan.validation_sequences, flops_per_token(model)
    product = factors(layout, train.execution.tensor_parallel)
    dependent = " (train.json has no global_batch_size, so the batch depends on the world size)"
    group_rates = describe_group_rates(train.optimization)
    validation = "none (validation_interval is null)"
    if sequences:
        validation = (
            f"every {train.validation.validation_interval} steps, {sequences} x {layout.context_length} "
            f"= {sequences * layout.context_length:,} tokens{' of each dataset' if len(plan.sources) > 1 else ''}"
        )
    return [
        f"model        {parameter_count(model):,} parameters: {model.n_layers} layers x {model.emb_dim} wide, "
        f"{model.n_heads} heads, context {model.context_length}, vocabulary {model.vocab_size:,}, "
        f"{'tied' if model.tie_weights else 'untied'} head",
        f"batch        global batch {layout.global_batch_size} sequences = {product}"
        f"{dependent if train.batch.global_batch_size is None else ''}",
        *(f"balance      {line}" for line in describe_balance(layout)),
        f"step         {layout.global_batch_size} x {layout.context_length} = {plan.tokens_per_step:,} tokens",
        f"run          {plan.steps:,} steps x {plan.tokens_per_step:,} = {plan.train_tokens:,} tokens",
        *(f"data         {_describe_source(source)}" for source in plan.sources),
        f"compute      {flops:,} FLOPs per token, {flops * plan.train_tokens:.3g} in total",
        f"optimizer    {describe_optimizer(train.optimization)}",
        f"schedule     {describe_schedule(plan.schedule)}",
        *([] if group_rates is None else [f"rates        {group_rates}"]),
        f"validation   {validation}",
        f"checkpoints  every {train.checkpoints.checkpoint_interval} steps; the newest "
        f"{train.checkpoints.keep_checkpoints} and the best are kept"
        + (f", and uploaded to {train.checkpoints.checkpoints}" if train.checkpoints.checkpoints else ""),
    ]


def _count_steps(
    train: TrainConfig, layout: Layout, lengths: Mapping[str, int | None], windows: Mapping[str, int | None]
) -> int:
    """Return the number of steps of a run. Raises BadInput if this number is not known yet, is 0, or is too large."""
    data, tokens_per_step = train.data, layout.global_batch_size * layout.context_length
    if data.min_train_tokens is not None:
        steps = -(-data.min_train_tokens // tokens_per_step)
    else:
        [(dataset, tokens)], [available] = lengths.items(), windows.values()
        if available is None:
            unknown = f"so the number of steps is not known without all token files of {dataset}"
            raise BadInput(
                train.located(
                    Problem(
                        key="min_train_tokens",
                        text=f"min_train_tokens is null (all tokens), {unknown}",
                        advice="prepare or download them, pass --token-files DIR, or set min_train_tokens",
                    )
                )
            )
        steps = available * data.max_epochs // layout.global_batch_size
        if steps == 0:
            least = f"at least {data.start_train_token + tokens_per_step + 1:,} for one step"
            raise BadInput(
                train.located(
                    Problem(key="dataset", found=f"{tokens:,} tokens", expected=least, advice="prepare more tokens")
                )
            )
    if steps > MOST_STEPS:
        raise BadInput(
            train.located(
                Problem(
                    found=f"{steps:,} steps of {layout.global_batch_size} sequences",
                    expected=f"at most {MOST_STEPS:,}",
                    advice="lower min_train_tokens or max_epochs, or raise global_batch_size",
                )
            )
        )
    return steps


def _check_epochs(train: TrainConfig, source: SourcePlan) -> None:
    """Raise BadInput if the run needs more than `max_epochs` of a dataset."""
    if source.windows is None or source.sequences <= source.windows * train.data.max_epochs:
        return
    demand = f"the run reads {source.sequences:,} windows of {source.dataset}"
    if source.windows == 0:
        problem = f"dataset: {demand}, which has fewer than context_length + 1 tokens"
        keys = ("context_length",)
        raise BadInput(
            train.located(Problem(key="dataset", text=problem, advice="prepare more tokens", other_keys=keys))
        )
    epochs = -(-source.sequences // source.windows)
    raise BadInput(
        train.located(
            Problem(
                key="max_epochs",
                found=str(train.data.max_epochs),
                expected=f"at least {epochs:,}",
                cause=f"{demand}, which has only {source.windows:,}",
                advice=f"prepare more tokens, lower min_train_tokens, or set max_epochs to {epochs:,}",
            )
        )
    )


def _describe_source(source: SourcePlan) -> str:
    """Return how much of a dataset the run reads, for the description of the run."""
    if source.windows is None:
        return f"{source.sequences:,} windows of {source.dataset}; its token files are not complete on this disk yet"
    epochs = source.epochs(source.sequences)
    return f"{source.sequences:,} windows of {source.dataset}: {epochs:.2f} epochs of {source.windows:,} windows"
