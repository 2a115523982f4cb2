"""The keys of `train.json`, in groups: the type, default, check, meaning and other names of each key.

`train.py --keys` prints the texts in this file, and tests compare the tables in docs/ with them. The fields here
have the same names as the keys in `train.json`. If gpjt/ddp-base-model-from-scratch has a key for the same setting, the
key has the same name and default here, so that the run directories of that project have the same meaning in Lockstep.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from common.checks import OlderSpelling, ValueCheck, boolean, integer, key_field, number, one_of, optional, set_one_form
from common.files import BUCKET_SCHEMES, is_bucket
from common.text import either, quoted
from training.config.dataset_config import DATASET_VALUES, DatasetPart, normalize_dataset, read_parts
from training.schedule import DECAYS

# Schedules that gpjt's run directories write as booleans. The records of a run contain these booleans, too.
_SCHEDULES = {"cosine": True, "constant": False}
_SCHEDULE_NAMES = (*_SCHEDULES, *(name for name in DECAYS if name not in _SCHEDULES))
LARGEST_RATE = 1e30  # this rate still fits into fp32 after it is divided by Adam's bias correction
FIRST_MOMENTUM = 0.85  # at the start of Muon's momentum warm-up, as in KellerJordan/modded-nanogpt
OPTIMIZERS = {  # descriptions by name; training/optimizers/NAME.py has the update rules
    "adamw": "AdamW",
    "muon": "Muon for the matrices of the blocks, AdamW for all other parameters",
}
GROUP_RATES = tuple(f"{group}_learning_rate" for group in ("matrix", "embedding", "head", "vector"))


def _check_dataset(_: Any, __: Any, value: Any) -> None:
    try:
        read_parts(value)
    except ValueError as error:
        raise ValueError(f"dataset: {error}") from error


# This is not `one_of`, because a program may register its own optimizer after importing this module.
_OPTIMIZER = ValueCheck(lambda value: value in list(OPTIMIZERS), either(f'"{name}"' for name in OPTIMIZERS))
_BUCKET = ValueCheck(
    lambda value: value is None or (isinstance(value, str) and is_bucket(value)),
    f"null, or {either(f'{scheme}://BUCKET/PREFIX' for scheme in BUCKET_SCHEMES)} without credentials; checkpoints are "
    "always saved on the disk as well",
)


def _microbatch_size_from_minibatch_size(size: Any, file_values: Mapping[str, Any]) -> Any:
    """Return gpjt's minibatch_size, which is our microbatch_size. Raise ValueError if the two keys disagree."""
    if file_values.get("microbatch_size", size) != size:
        raise ValueError(
            f"got {quoted(size)}, wanted the value of microbatch_size, because minibatch_size is the old name of that "
            "key; remove one of the two"
        )
    return size


def _precision_from_use_amp(use_amp: Any, _: Mapping[str, Any]) -> str:
    if type(use_amp) is not bool:
        raise ValueError(f"got {quoted(use_amp)}, wanted true or false")
    return "auto" if use_amp else "fp32"


def _sequences_from_validation_batches(batches: Any, file_values: Mapping[str, Any]) -> int:
    """Convert gpjt's validation_batches, a number of micro-batches, to a number of sequences."""
    if "validation_sequences" in file_values:
        raise ValueError(
            f"got {quoted(batches)}, but validation_sequences sets the same value; remove validation_batches"
        )
    size = file_values.get("microbatch_size")
    if type(batches) is not int or type(size) is not int:
        raise ValueError(f"got {quoted(batches)}, wanted a whole number of micro-batches")
    return batches * size


@attrs.frozen(kw_only=True)
class DataOptions:
    """Training data: the datasets, where reading starts, and the order of reading."""

    dataset: str | Sequence[Mapping[str, Any]] = key_field(
        _check_dataset,
        accepted_values=DATASET_VALUES,
        converter=normalize_dataset,
        meaning="a directory of token files, a dataset on the Hugging Face Hub (OWNER/NAME or hf:OWNER/NAME), token "
        "files in a bucket (s3://BUCKET/PREFIX), or a weighted list of these; a local folder of the name OWNER/NAME is "
        "used unless hf: is in front, and a NOTE warns if prepare_data.py did not make that folder",
    )
    min_train_tokens: int | None = key_field(
        optional(integer(1)),
        None,
        meaning="number of tokens to train on, rounded up to whole steps; null: all tokens, max_epochs times; required "
        "if dataset is a list",
        similar={
            "which counts tokens; the option --max-steps pauses a run": "max_iters max_steps num_iterations "
            "num_train_steps",
            "in tokens, not in tokens per parameter": "target_param_data_ratio",
            "because the decay always ends with the run": "lr_decay_iters",
        },
    )
    start_train_token: int = key_field(
        integer(0),
        0,
        meaning="position of the first token to read in the train stream; if dataset is a list, in each of its streams",
    )
    max_epochs: int = key_field(
        integer(1),
        1,
        meaning="largest number of epochs; a run that needs more is refused",
        names="num_train_epochs epochs",
        plumbing=True,  # the number of steps already determines which tokens are read
    )
    era_tokens: int | None = key_field(
        optional(integer(1)),
        None,
        meaning="shuffle only within eras of this many tokens, as --follow requires; null: over the whole stream",
    )
    shuffle: bool = key_field(
        boolean(),
        False,
        recommended=True,
        meaning="true: read windows in a random order, which depends on random_seed and differs in each epoch; false: "
        "in stream order",
    )
    objective: str = key_field(
        one_of("text", "answers"),
        "text",
        meaning='tokens that add to the loss; "text": all of them; "answers": in conversations, only the answers (see '
        "docs/fine-tuning.md); in other datasets of the same list, all of them",
    )

    @property
    def parts(self) -> tuple[DatasetPart, ...]:
        return read_parts(self.dataset)


@attrs.frozen(kw_only=True)
class BatchOptions:
    """Batch sizes, in sequences. The global batch changes what is learned; the micro-batch changes memory use."""

    microbatch_size: int = key_field(
        integer(1, 1 << 20),
        meaning="sequences per forward pass on one rank, limited by memory",
        names="per_device_train_batch_size device_batch_size",
        similar={
            "the sequences per forward pass on one GPU; for the sequences of a whole step, set "
            "train.global_batch_size": "batch_size"
        },
        older=OlderSpelling("minibatch_size", _microbatch_size_from_minibatch_size),
        plumbing=True,
    )
    global_batch_size: int | None = key_field(
        optional(integer(1, 1 << 30)),
        None,
        meaning="sequences per step on all ranks together; null: the data-parallel size x microbatch_size x "
        "gradient_accumulation_steps",
        names="train_batch_size",
        similar={"in sequences, not tokens": "total_batch_size"},
    )
    gradient_accumulation_steps: int | None = key_field(
        optional(integer(1, 1 << 20)),
        None,
        meaning="micro-steps per step on each rank; null: the number that global_batch_size requires, or 1 without it",
        plumbing=True,
    )


def _group_rate(group: str, names: str) -> Any:
    """Return the field of a parameter group's peak learning rate, which defaults to `learning_rate`."""
    check = optional(number(0.0, LARGEST_RATE, above=True))
    return key_field(check, None, meaning=f"peak learning rate of {group}; null: learning_rate", names=names)


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
        meaning="peak learning rate of the schedule, or the constant learning rate",
        names="lr max_lr",
    )
    matrix_learning_rate: float | None = _group_rate(
        'the matrices of the blocks, which Muon trains if optimizer is "muon"', names="matrix_lr muon_lr"
    )
    embedding_learning_rate: float | None = _group_rate(
        "the token and position embeddings", names="embedding_lr embed_lr"
    )
    head_learning_rate: float | None = _group_rate("an untied output head", names="head_lr unembedding_lr")
    vector_learning_rate: float | None = _group_rate("1-D parameters: gains and biases", names="scalar_lr")
    schedule_learning_rate: bool | str = key_field(
        boolean(*_SCHEDULE_NAMES),
        False,
        recommended=True,
        converter=lambda value: _SCHEDULES.get(value, value) if isinstance(value, str) else value,
        meaning='learning-rate schedule; true means "cosine", false means "constant"',
        names="decay_lr",
        similar={
            "with the values " + either(f'"{name}"' for name in _SCHEDULE_NAMES): "lr_scheduler_type lr_scheduler "
            "scheduler schedule lr_schedule learning_rate_schedule"
        },
    )
    warmup_period_percent: float = key_field(
        number(0.0, 100.0),
        0.0,
        meaning="length of the linear warm-up, in percent of all steps; a constant learning rate has no warm-up",
        similar={"in percent of all steps": "warmup_iters warmup_steps warmup_step warmup_ratio warmup"},
    )
    decay_period_percent: float | None = key_field(
        optional(number(0.0, 100.0, above=True)),
        None,
        meaning='length of the decay at the end of "warmup_stable_decay", in percent of all steps; null: '
        f"{DECAYS['warmup_stable_decay'].period_percent:g}",
        similar={"in percent of all steps": "warmdown_iters cooldown_frac warmdown_ratio decay_ratio"},
    )
    final_learning_rate_percent: float | None = key_field(
        optional(number(0.0, 100.0)),
        None,
        meaning="learning rate of the last step, in percent of learning_rate; null: "
        + ", ".join(f'{decay.final_percent:g} for "{name}"' for name, decay in DECAYS.items()),
        similar={"in percent of train.learning_rate": "min_lr min_lr_ratio final_lr_frac"},
    )
    weight_decay: float = key_field(
        number(0.0), 0.1, meaning="weight decay of both optimizers, applied to matrices only", names="wd"
    )
    adam_beta1: float = key_field(
        number(0.0, 0.99999), 0.9, meaning="decay rate of AdamW's first moment", names="beta1"
    )
    adam_beta2: float = key_field(
        number(0.0, 0.99999),
        0.999,
        meaning="decay rate of AdamW's second moment; the run directories in runs/ use 0.95, as GPT-3 did",
        names="beta2",
    )
    muon_split_qkv: bool = key_field(
        boolean(), False, meaning="true: Muon updates queries, keys and values as three separate matrices"
    )
    muon_momentum: float = key_field(number(0.0, 0.99999), 0.95, meaning="Muon's momentum after its warm-up")
    muon_momentum_warmup_steps: int = key_field(
        integer(0),
        0,
        meaning="steps over which Muon's momentum rises linearly to muon_momentum; modded-nanogpt's records use 300",
    )
    muon_first_momentum: float | None = key_field(
        optional(number(0.0, 0.99999)),
        None,
        meaning=f"Muon's momentum at the start of its warm-up; null: {FIRST_MOMENTUM}",
    )
    clipping_max_norm: float | None = key_field(
        optional(number(0.0, above=True)),
        None,
        recommended=1.0,
        meaning="gradient clipping: largest global L2 norm of the gradient; null: no clipping",
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
        """Name of a group (see training/optimizers/update_rule.py) -> the peak learning rate that is set for it.

        All other groups use `learning_rate`.
        """
        rates = {name.partition("_")[0]: getattr(self, name) for name in GROUP_RATES}
        return {group: rate for group, rate in rates.items() if rate is not None}

    @property
    def first_momentum(self) -> float:
        return FIRST_MOMENTUM if self.muon_first_momentum is None else self.muon_first_momentum

    @property
    def decay(self) -> str | None:
        """The decay's name in training/schedule.py; None if the learning rate is constant."""
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
        meaning="how many of the newest checkpoints to keep; the best checkpoint is always kept as well",
        names="save_total_limit",
        plumbing=True,
    )
    checkpoints: str | None = key_field(
        _BUCKET,
        None,
        meaning=f"bucket to which checkpoints are also uploaded: {either(f'{name}://' for name in BUCKET_SCHEMES)}",
        plumbing=True,
    )


@attrs.frozen(kw_only=True)
class ValidationOptions:
    validation_interval: int | None = key_field(
        optional(integer(1)),
        500,
        meaning="steps between validations; every checkpoint is also validated, unless a signal caused it; null: "
        "never validate",
        similar={"in steps": "eval_interval eval_steps eval_every"},
        plumbing=True,
    )
    validation_sequences: int = key_field(
        integer(1, 1 << 30),
        1024,
        meaning="sequences per validation",
        similar={"in sequences": "eval_iters"},
        older=OlderSpelling("validation_batches", _sequences_from_validation_batches),
        plumbing=True,
    )
    start_val_token: int = key_field(
        integer(0), 0, meaning="position of the first token to read in the validation stream", plumbing=True
    )
    patience: int | None = key_field(
        optional(integer(1)),
        None,
        meaning="end the run, as complete, after this many checkpoints in a row without a new best validation loss; "
        "null: train all steps",
    )


@attrs.frozen(kw_only=True)
class ExecutionOptions:
    parallel: str = key_field(
        one_of("ddp", "fsdp", "hsdp"),
        "ddp",
        meaning='where the parameters are; "ddp": all of them on every rank; "fsdp": sharded over all ranks; "hsdp": '
        "sharded over the GPUs of each node",
        names="fsdp",
        plumbing=True,
    )
    tensor_parallel: int = key_field(
        integer(1, 1024),
        1,
        meaning='number of neighboring ranks of a node that share each layer; works with every value of "parallel"',
        plumbing=True,
    )
    tensor_shards: int | None = key_field(
        optional(integer(1, 1024)),
        None,
        meaning="number of parts into which each layer is split; at most that many ranks can share the layer; this "
        "number changes the bits; null: the value of tensor_parallel",
        plumbing=True,
    )
    determinism: str | None = key_field(
        optional(one_of("off", "run", "elastic")),
        None,
        meaning='which runs give the same bits; "off": none; "run": those with the same data-parallel size and the '
        'same value of "parallel"; "elastic": all, on any number of ranks; null: elastic on a CPU if the world size '
        "allows it, off on a GPU; see docs/exactness.md",
        plumbing=True,
    )
    cpu_threads: int = key_field(
        integer(1, 1024), 1, meaning="threads per rank on a CPU; their number changes the bits", plumbing=True
    )
    precision: str = key_field(
        one_of("auto", "bf16", "fp16", "fp32"),
        "auto",
        meaning='floating-point type of the computation; "auto": bf16 on GPUs that support it, fp16 on other GPUs, '
        "fp32 on a CPU",
        names="dtype",
        similar={'set to "bf16"': "bf16", 'set to "fp16"': "fp16"},
        older=OlderSpelling("use_amp", _precision_from_use_amp),
    )
    compile: bool | str | None = key_field(
        optional(boolean("model")),
        None,
        meaning='true: compile every block, and the head with the loss, with torch.compile; "model": compile the whole '
        "network as one graph, which FSDP does not allow; false: do not compile; null: true on a GPU, false on a CPU",
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
    """Settings that trade compute for memory."""

    loss_chunks: int = key_field(
        integer(1, 1 << 20),
        1,
        meaning="save memory: compute logits and loss in this many parts, one at a time, and recompute them in the "
        "backward pass",
        plumbing=True,
    )
    recompute_blocks: bool = key_field(
        boolean(),
        False,
        meaning="activation checkpointing: keep only the inputs of blocks and recompute the rest in the backward pass",
        names="gradient_checkpointing",
        plumbing=True,
    )
