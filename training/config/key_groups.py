"""The keys of `train.json` in groups: for each key its type, default and check, its meaning and its other names.

`train.py --keys` prints what is written here, and tests compare the tables of docs/ with it. Spellings are those of
the file. Keys and defaults are those of gpjt/ddp-base-model-from-scratch where it has them, so that its run directories
mean the same here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from common.checks import OlderSpelling, ValueCheck, boolean, integer, key_field, number, one_of, optional, set_one_form
from common.files import BUCKET_SCHEMES, is_bucket
from common.text import either, quoted
from training.config.dataset_config import DATASET_VALUES, DatasetPart, one_form_of_dataset, read_parts
from training.schedule import DECAYS

# Names that mean the same as the booleans of gpjt's run directories, which are what a run records.
_SCHEDULES = {"cosine": True, "constant": False}
_SCHEDULE_NAMES = (*_SCHEDULES, *(name for name in DECAYS if name not in _SCHEDULES))
LARGEST_RATE = 1e30  # learning rate that torch takes as fp32, also over a bias correction
FIRST_MOMENTUM = 0.85  # of Muon's momentum warm-up, as in KellerJordan/modded-nanogpt
OPTIMIZERS = {  # by name, with their words; the update rules of each are in training/optimizers/NAME.py
    "adamw": "AdamW",
    "muon": "Muon for the matrices of the blocks, AdamW for all else",
}
GROUP_RATES = tuple(f"{group}_learning_rate" for group in ("matrix", "embedding", "head", "vector"))


def _dataset(_: Any, __: Any, value: Any) -> None:
    try:
        read_parts(value)
    except ValueError as error:
        raise ValueError(f"dataset: {error}") from error


# Not one_of: a program may register an optimizer of its own after the import.
_OPTIMIZER = ValueCheck(lambda value: value in list(OPTIMIZERS), either(f'"{name}"' for name in OPTIMIZERS))
_BUCKET = ValueCheck(
    lambda value: value is None or (isinstance(value, str) and is_bucket(value)),
    f"null, or {either(f'{scheme}://BUCKET/PREFIX' for scheme in BUCKET_SCHEMES)} without credentials; they are on the "
    "disk anyway",
)


def _same_size(size: Any, others: Mapping[str, Any]) -> Any:
    """Return gpjt's minibatch_size, our microbatch_size."""
    if others.get("microbatch_size", size) != size:
        raise ValueError(
            f"got {quoted(size)}, wanted the value of microbatch_size, whose old name it is; keep one of them"
        )
    return size


def _precision_of_amp(use_amp: Any, _: Mapping[str, Any]) -> str:
    if type(use_amp) is not bool:
        raise ValueError(f"got {quoted(use_amp)}, wanted true or false")
    return "auto" if use_amp else "fp32"


def _sequences_of_batches(batches: Any, others: Mapping[str, Any]) -> int:
    """Return the sequences of gpjt's validation_batches, which are micro-batches."""
    if "validation_sequences" in others:
        raise ValueError(f"got {quoted(batches)} and validation_sequences, which mean the same; keep the latter")
    size = others.get("microbatch_size")
    if type(batches) is not int or type(size) is not int:
        raise ValueError(f"got {quoted(batches)}, wanted a whole number of micro-batches")
    return batches * size


@attrs.frozen(kw_only=True)
class DataOptions:
    """Training data: datasets, where reading starts and in which order."""

    dataset: str | Sequence[Mapping[str, Any]] = key_field(
        _dataset,
        accepted_values=DATASET_VALUES,
        converter=one_form_of_dataset,
        meaning="a directory of token files, a dataset of the hub (OWNER/NAME or hf:OWNER/NAME), token files in a "
        "bucket (s3://BUCKET/PREFIX), or a weighted list; without hf:, a local folder of that name is read instead, "
        "with a NOTE if prepare_data.py did not make it",
    )
    min_train_tokens: int | None = key_field(
        optional(integer(1)),
        None,
        meaning="tokens to train on, rounded up to whole steps; null: all tokens, max_epochs times; required with a "
        "list of datasets",
        similar={
            "which counts tokens; the option --max-steps pauses a run": "max_iters max_steps num_iterations "
            "num_train_steps",
            "in tokens, not in tokens per parameter": "target_param_data_ratio",
            "the decay ends with the run": "lr_decay_iters",
        },
    )
    start_train_token: int = key_field(
        integer(0), 0, meaning="first token to read of the train stream, of each dataset in a list"
    )
    max_epochs: int = key_field(
        integer(1),
        1,
        meaning="limit of epochs; a run that needs more is refused",
        names="num_train_epochs epochs",
        plumbing=True,  # the number of steps tells what is read
    )
    era_tokens: int | None = key_field(
        optional(integer(1)),
        None,
        meaning="shuffle within eras of this many tokens, for --follow; null: over the whole stream",
    )
    shuffle: bool = key_field(
        boolean(),
        False,
        recommended=True,
        meaning="read windows in an order permuted by random_seed, another one in each epoch; false: in stream order",
    )
    objective: str = key_field(
        one_of("text", "answers"),
        "text",
        meaning='"answers": in conversations only the answers count, see fine-tuning; other datasets next to them '
        "count whole",
    )

    @property
    def parts(self) -> tuple[DatasetPart, ...]:
        return read_parts(self.dataset)


@attrs.frozen(kw_only=True)
class BatchOptions:
    """Batch, in sequences: the global batch changes what is learned, the micro-batch what fits into memory."""

    microbatch_size: int = key_field(
        integer(1, 1 << 20),
        meaning="sequences of one forward pass on one rank: what fits into memory",
        names="per_device_train_batch_size device_batch_size",
        similar={"sequences of a GPU in one forward pass; a step has train.global_batch_size": "batch_size"},
        older=OlderSpelling("minibatch_size", _same_size),
        plumbing=True,
    )
    global_batch_size: int | None = key_field(
        optional(integer(1, 1 << 30)),
        None,
        meaning="sequences of one step on all ranks; null: micro-batch x accumulation x data-parallel size",
        names="train_batch_size",
        similar={"in sequences, not tokens": "total_batch_size"},
    )
    gradient_accumulation_steps: int | None = key_field(
        optional(integer(1, 1 << 20)),
        None,
        meaning="micro-steps of one step on each rank; null: what global_batch_size needs, or 1 without it",
        plumbing=True,
    )


def _group_rate(group: str, names: str) -> Any:
    """Return the field of the peak learning rate of a group of parameters, which is by default that of all others."""
    check = optional(number(0.0, LARGEST_RATE, above=True))
    return key_field(check, None, meaning=f"{group}; null: learning_rate", names=names)


@attrs.frozen(kw_only=True)
class OptimizationOptions:
    """Optimizer, learning-rate schedule, weight decay (matrices only), gradient clipping."""

    optimizer: str = key_field(
        _OPTIMIZER,
        "adamw",
        meaning="; ".join(f'"{name}": {words}' for name, words in OPTIMIZERS.items()),
        names="optim",
    )
    learning_rate: float = key_field(
        number(0.0, LARGEST_RATE, above=True),
        4e-4,
        meaning="peak of the schedule, or the constant rate",
        names="lr max_lr",
    )
    matrix_learning_rate: float | None = _group_rate(
        'peak for the matrices of the blocks, which optimizer "muon" takes', names="matrix_lr muon_lr"
    )
    embedding_learning_rate: float | None = _group_rate(
        "peak for the token and position embeddings", names="embedding_lr embed_lr"
    )
    head_learning_rate: float | None = _group_rate("peak for an untied output head", names="head_lr unembedding_lr")
    vector_learning_rate: float | None = _group_rate("peak for 1-D parameters, gains and biases", names="scalar_lr")
    schedule_learning_rate: bool | str = key_field(
        boolean(*_SCHEDULE_NAMES),
        False,
        recommended=True,
        converter=lambda value: _SCHEDULES.get(value, value) if isinstance(value, str) else value,
        meaning='schedule of the learning rate; true is "cosine", false is "constant"',
        names="decay_lr",
        similar={
            either(f'"{name}"' for name in _SCHEDULE_NAMES): "lr_scheduler_type lr_scheduler scheduler schedule "
            "lr_schedule learning_rate_schedule"
        },
    )
    warmup_period_percent: float = key_field(
        number(0.0, 100.0),
        0.0,
        meaning="linear warm-up, in percent of all steps; a constant rate has none",
        similar={"in percent of all steps": "warmup_iters warmup_steps warmup_step warmup_ratio warmup"},
    )
    decay_period_percent: float | None = key_field(
        optional(number(0.0, 100.0, above=True)),
        None,
        meaning='decay of a "warmup_stable_decay", in percent of all steps, the last ones; null: '
        f"{DECAYS['warmup_stable_decay'].period_percent:g}",
        similar={"in percent of all steps": "warmdown_iters cooldown_frac warmdown_ratio decay_ratio"},
    )
    final_learning_rate_percent: float | None = key_field(
        optional(number(0.0, 100.0)),
        None,
        meaning="rate of the last step, in percent of learning_rate; null: "
        + ", ".join(f'{decay.final_percent:g} for "{name}"' for name, decay in DECAYS.items()),
        similar={"in percent of train.learning_rate": "min_lr min_lr_ratio final_lr_frac"},
    )
    weight_decay: float = key_field(
        number(0.0), 0.1, meaning="weight decay of either optimizer, on matrices only", names="wd"
    )
    adam_beta1: float = key_field(number(0.0, 0.99999), 0.9, meaning="decay of AdamW's first moment", names="beta1")
    adam_beta2: float = key_field(
        number(0.0, 0.99999),
        0.999,
        meaning="decay of AdamW's second moment; the shipped directories use GPT-3's 0.95",
        names="beta2",
    )
    muon_split_qkv: bool = key_field(boolean(), False, meaning="Muon takes queries, keys and values as three matrices")
    muon_momentum: float = key_field(number(0.0, 0.99999), 0.95, meaning="Muon's momentum, after its warm-up")
    muon_momentum_warmup_steps: int = key_field(
        integer(0),
        0,
        meaning="steps in which the momentum rises linearly to muon_momentum; the records of modded-nanogpt have 300",
    )
    muon_first_momentum: float | None = key_field(
        optional(number(0.0, 0.99999)),
        None,
        meaning=f"momentum from which the warm-up of the momentum starts; null: {FIRST_MOMENTUM}",
    )
    clipping_max_norm: float | None = key_field(
        optional(number(0.0, above=True)),
        None,
        recommended=1.0,
        meaning="gradient clipping: the largest global L2 norm; null: no clipping",
        names="grad_clip max_grad_norm",
    )

    def __attrs_post_init__(self) -> None:
        decay = None if self.decay is None else DECAYS[self.decay]
        set_one_form(
            self,
            decay_period_percent=decay and decay.period_percent,
            final_learning_rate_percent=decay and decay.final_percent,
        )

    @property
    def group_learning_rates(self) -> dict[str, float]:
        """The peaks that differ from `learning_rate`, by the group's name in training/optimizers/update_rule.py."""
        rates = {name.partition("_")[0]: getattr(self, name) for name in GROUP_RATES}
        return {group: rate for group, rate in rates.items() if rate is not None}

    @property
    def first_momentum(self) -> float:
        return FIRST_MOMENTUM if self.muon_first_momentum is None else self.muon_first_momentum

    @property
    def decay(self) -> str | None:
        """The decay of the learning rate, by its name in training/schedule.py; None: it is constant."""
        scheduled = self.schedule_learning_rate
        return scheduled if isinstance(scheduled, str) else "cosine" if scheduled else None


@attrs.frozen(kw_only=True)
class CheckpointOptions:
    checkpoint_interval: int = key_field(
        integer(1),
        500,
        meaning="steps between checkpoints; the last step is always saved",
        similar={"in steps": "save_steps save_every save_interval"},
        plumbing=True,
    )
    keep_checkpoints: int = key_field(
        integer(1),
        3,
        meaning="number of newest checkpoints to keep; the best one is kept in addition",
        names="save_total_limit",
        plumbing=True,
    )
    checkpoints: str | None = key_field(
        _BUCKET,
        None,
        meaning=f"bucket to which checkpoints are uploaded as well: {either(f'{name}://' for name in BUCKET_SCHEMES)}",
        plumbing=True,
    )


@attrs.frozen(kw_only=True)
class ValidationOptions:
    validation_interval: int | None = key_field(
        optional(integer(1)),
        500,
        meaning="steps between validations; checkpoints are validated too, except on a signal; null: never",
        similar={"in steps": "eval_interval eval_steps eval_every"},
        plumbing=True,
    )
    validation_sequences: int = key_field(
        integer(1, 1 << 30),
        1024,
        meaning="sequences of one validation",
        similar={"in sequences": "eval_iters"},
        older=OlderSpelling("validation_batches", _sequences_of_batches),
        plumbing=True,
    )
    start_val_token: int = key_field(
        integer(0), 0, meaning="first token to read of the validation stream", plumbing=True
    )
    patience: int | None = key_field(
        optional(integer(1)),
        None,
        meaning="checkpoints without a new best validation loss after which the run ends, complete; null: it trains "
        "all its steps",
    )


@attrs.frozen(kw_only=True)
class ExecutionOptions:
    parallel: str = key_field(
        one_of("ddp", "fsdp", "hsdp"),
        "ddp",
        meaning='"ddp", "fsdp" (shards), or "hsdp" (shards over the GPUs of each node)',
        names="fsdp",
        plumbing=True,
    )
    tensor_parallel: int = key_field(
        integer(1, 1024),
        1,
        meaning="neighboring ranks of a node that share each layer, with any value of parallel",
        plumbing=True,
    )
    tensor_shards: int | None = key_field(
        optional(integer(1, 1024)),
        None,
        meaning="parts in which a layer is computed, on that many ranks or fewer; they change the bits; null: "
        "tensor_parallel",
        plumbing=True,
    )
    determinism: str | None = key_field(
        optional(one_of("off", "run", "elastic")),
        None,
        meaning='"off", "run" or "elastic": see exactness; null: elastic on a CPU where the world size allows it, off '
        "on a GPU",
        plumbing=True,
    )
    cpu_threads: int = key_field(
        integer(1, 1024), 1, meaning="threads per rank on a CPU; they change the bits", plumbing=True
    )
    precision: str = key_field(
        one_of("auto", "bf16", "fp16", "fp32"),
        "auto",
        meaning='"bf16", "fp16", "fp32"; "auto": bf16 on GPUs that support it, fp16 on others, fp32 on a CPU',
        names="dtype",
        similar={"bf16": "bf16", "fp16": "fp16"},
        older=OlderSpelling("use_amp", _precision_of_amp),
    )
    compile: bool | str | None = key_field(
        optional(boolean("model")),
        None,
        meaning='true: torch.compile, block by block, and of head and loss; "model": the network as one graph, not for '
        "FSDP; false: off; null: true on a GPU, false on a CPU",
        names="torch_compile",
        plumbing=True,
    )

    def __attrs_post_init__(self) -> None:
        set_one_form(self, tensor_shards=self.tensor_parallel)

    @property
    def shards(self) -> int:
        return self.tensor_shards or self.tensor_parallel


@attrs.frozen(kw_only=True)
class MemoryOptions:
    """Memory options: settings that trade compute for memory."""

    loss_chunks: int = key_field(
        integer(1, 1 << 20),
        1,
        meaning="parts in which logits and loss are computed, one at a time, and again in the backward pass: less "
        "memory",
        plumbing=True,
    )
    recompute_blocks: bool = key_field(
        boolean(),
        False,
        meaning="activation checkpointing: keep only the inputs of blocks, and recompute the rest in the backward pass",
        names="gradient_checkpointing",
        plumbing=True,
    )
