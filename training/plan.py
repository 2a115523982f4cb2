"""What a run will do, from its configuration and the world size alone: batches, steps, tokens, FLOPs."""

import attrs

from errors import BadInput
from model.config import flops_per_token, parameter_count
from tokens.batches import Layout, WindowOrder, window_count
from training.config import Run
from training.schedule import Schedule


@attrs.frozen(kw_only=True)
class Plan:
    """The arithmetic of one run on one world size."""

    layout: Layout
    steps: int
    start_token: int  # of the train stream
    schedule: Schedule
    validation_sequences: int  # of one validation, all ranks; 0 without validation

    @property
    def tokens_per_step(self) -> int:
        return self.layout.global_batch_size * self.layout.context_length

    @property
    def train_tokens(self) -> int:
        return self.steps * self.tokens_per_step


def make_plan(run: Run, world_size: int, available_tokens: int | None = None) -> Plan:
    """Derive accumulation, steps and schedule. `available_tokens` is the length of the train stream, where known.

    Raises BadInput as `derive_layout` does, and when `min_train_tokens` is null and the stream's length is not known or
    too short for one step.
    """
    layout = derive_layout(run, world_size)
    tokens_per_step = layout.global_batch_size * layout.context_length
    wanted = run.train.min_train_tokens
    if wanted is not None:
        steps = -(-wanted // tokens_per_step)
    elif available_tokens is None:
        raise BadInput(
            f"{run.directory / 'train.json'}: min_train_tokens is null (all tokens), so the number of steps needs "
            "the token files; pass --token-files DIR or set min_train_tokens"
        )
    else:
        windows = window_count(available_tokens, run.train.start_train_token, layout.context_length)
        steps = windows // layout.global_batch_size
        if steps == 0:
            raise BadInput(
                f"{run.directory / 'train.json'}: dataset: got {available_tokens:,} tokens, wanted at least "
                f"{run.train.start_train_token + tokens_per_step + 1:,} for one step; prepare more"
            )
    schedule = Schedule(
        peak=run.train.learning_rate,
        warmup_steps=int(steps * run.train.warmup_period_percent // 100),
        total_steps=steps,
        constant=not run.train.schedule_learning_rate,
    )
    validating = run.train.validation_interval is not None
    return Plan(
        layout=layout,
        steps=steps,
        start_token=run.train.start_train_token,
        schedule=schedule,
        validation_sequences=run.train.validation_sequences if validating else 0,
    )


def derive_layout(run: Run, world_size: int) -> Layout:
    """Return how the global batch is spread. Raises BadInput when the world size does not divide it."""
    train = run.train
    if train.global_batch_size is None:
        accumulation = train.gradient_accumulation_steps or 1
    else:
        micro_batches = train.global_batch_size // train.microbatch_size
        if micro_batches % world_size:
            legal = ", ".join(str(size) for size in range(1, micro_batches + 1) if micro_batches % size == 0)
            raise BadInput(
                f"{run.directory / 'train.json'}: global_batch_size {train.global_batch_size} is {micro_batches} "
                f"micro-batches of {train.microbatch_size}, which world size {world_size} does not divide; "
                f"world sizes that do: {legal}"
            )
        accumulation = micro_batches // world_size
        if train.gradient_accumulation_steps not in (None, accumulation):
            raise BadInput(
                f"{run.directory / 'train.json'}: gradient_accumulation_steps: got "
                f"{train.gradient_accumulation_steps}, but global_batch_size {train.global_batch_size} makes it "
                f"{accumulation} on world size {world_size}; leave it out: it is derived"
            )
    return Layout(
        context_length=run.model.context_length,
        microbatch_size=train.microbatch_size,
        accumulation=accumulation,
        world_size=world_size,
    )


def window_order(run: Run, plan: Plan, available_tokens: int) -> WindowOrder:
    """Return the order in which the train stream's windows are read."""
    count = window_count(available_tokens, plan.start_token, plan.layout.context_length)
    return WindowOrder(count=count, shuffle=run.train.shuffle, seed=run.train.random_seed)


def describe(run: Run, plan: Plan) -> list[str]:
    """Return the arithmetic as lines for people."""
    layout, model = plan.layout, run.model
    batch = (
        f"global batch {layout.global_batch_size} sequences = micro-batch {layout.microbatch_size} "
        f"x accumulation {layout.accumulation} x world size {layout.world_size}"
    )
    if run.train.global_batch_size is None:
        batch += " (no global_batch_size in train.json: it follows the world size)"
    flops = flops_per_token(model)
    lines = [
        f"model        {parameter_count(model):,} parameters: {model.n_layers} layers x {model.emb_dim} wide, "
        f"{model.n_heads} heads, context {model.context_length}, vocabulary {model.vocab_size:,}, "
        f"{'tied' if model.tie_weights else 'untied'} head",
        f"batch        {batch}",
        f"step         {layout.global_batch_size} x {layout.context_length} = {plan.tokens_per_step:,} tokens",
        f"run          {plan.steps:,} steps x {plan.tokens_per_step:,} = {plan.train_tokens:,} tokens",
        f"compute      {flops:,} FLOPs a token, {flops * plan.train_tokens:.3g} in all",
        f"schedule     {_describe_schedule(plan.schedule)}",
    ]
    if sequences := plan.validation_sequences:
        lines.append(
            f"validation   every {run.train.validation_interval} steps, {sequences} x {layout.context_length} = "
            f"{sequences * layout.context_length:,} tokens"
        )
    else:
        lines.append("validation   none (validation_interval is null)")
    lines.append(
        f"checkpoints  every {run.train.checkpoint_interval} steps, the newest {run.train.keep_checkpoints} "
        "and the best are kept"
    )
    return lines


def _describe_schedule(schedule: Schedule) -> str:
    if schedule.constant:
        return f"constant learning rate {schedule.peak:g}"
    return (
        f"{schedule.warmup_steps:,} steps of warm-up to {schedule.peak:g}, "
        f"cosine decay to {schedule.peak / 10:g} at step {schedule.total_steps:,}"
    )
