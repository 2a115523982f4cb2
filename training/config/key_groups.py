"""The keys of `train.json` in groups: for each key its type, default and check, its unit or meaning.

Spellings are those of the file. Keys and defaults are those of gpjt/ddp-base-model-from-scratch where it has them, so
that its run directories mean the same here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from common.checks import ValueCheck, boolean, integer, number, one_of, optional, set_one_form
from common.errors import either
from common.files import BUCKET_SCHEMES, is_bucket
from training.config.dataset_config import DatasetPart, one_form_of_dataset, read_parts
from training.schedule import DECAYS

# Names that mean the same as the booleans of gpjt's run directories, which are what a run records.
_SCHEDULES = {"cosine": True, "constant": False}
LARGEST_RATE = 1e30  # learning rate that torch takes as fp32, also over a bias correction
FIRST_MOMENTUM = 0.85  # of Muon's momentum warm-up, as in KellerJordan/modded-nanogpt
OPTIMIZERS = {  # by name, with their words; the update rules of each are in training/optimizers/NAME.py
    "adamw": "AdamW",
    "muon": "Muon for the matrices of the blocks, AdamW for all else",
}
GROUP_RATES = tuple(f"{group}_learning_rate" for group in ("matrix", "embedding", "head", "vector"))


def define(
    check: Callable[[Any, "attrs.Attribute[Any]", Any], None],
    default: Any = attrs.NOTHING,
    *,
    plumbing: bool = False,
    converter: Callable[[Any], Any] | None = None,
) -> Any:
    """Define a key; one without a default is required. `converter`: of another spelling, before the check.

    `plumbing`: the key changes no trained weight, but for rounding. Runs that differ in plumbing keys and the seed
    alone count as one recipe: evaluate.py compare takes their difference for noise.
    """
    return attrs.field(default=default, validator=check, converter=converter, metadata={"plumbing": plumbing})


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


@attrs.frozen(kw_only=True)
class DataOptions:
    """Training data: datasets, where reading starts and in which order."""

    # of the hub, a local directory, or several with weights
    dataset: str | Sequence[Mapping[str, Any]] = define(_dataset, converter=one_form_of_dataset)
    min_train_tokens: int | None = define(optional(integer(1)), None)  # null: all tokens there are
    start_train_token: int = define(integer(0), 0)  # in each train stream
    max_epochs: int = define(integer(1), 1, plumbing=True)  # a limit: the number of steps tells what is read
    era_tokens: int | None = define(optional(integer(1)), None)  # range of a shuffle; null: the whole stream
    shuffle: bool = define(boolean(), False)  # windows in a seeded order
    # "answers": of conversations only the tokens with a weight count; those of other datasets count all
    objective: str = define(one_of("text", "answers"), "text")

    @property
    def parts(self) -> tuple[DatasetPart, ...]:
        return read_parts(self.dataset)


@attrs.frozen(kw_only=True)
class BatchOptions:
    """Batch, in sequences: the global batch changes what is learned, the micro-batch what fits into memory."""

    microbatch_size: int = define(integer(1, 1 << 20), plumbing=True)
    global_batch_size: int | None = define(optional(integer(1, 1 << 30)), None)
    gradient_accumulation_steps: int | None = define(optional(integer(1, 1 << 20)), None, plumbing=True)


@attrs.frozen(kw_only=True)
class OptimizationOptions:
    """Optimizer, learning-rate schedule, weight decay (matrices only), gradient clipping."""

    optimizer: str = define(_OPTIMIZER, "adamw")
    learning_rate: float = define(number(0.0, LARGEST_RATE, above=True), 4e-4)  # the schedule's peak
    # peaks of groups of parameters; null: learning_rate. Of the blocks' matrices:
    matrix_learning_rate: float | None = define(optional(number(0.0, LARGEST_RATE, above=True)), None)
    embedding_learning_rate: float | None = define(optional(number(0.0, LARGEST_RATE, above=True)), None)
    head_learning_rate: float | None = define(optional(number(0.0, LARGEST_RATE, above=True)), None)  # untied
    vector_learning_rate: float | None = define(optional(number(0.0, LARGEST_RATE, above=True)), None)  # gains, biases
    # true: linear warm-up, cosine decay; a name: another decay; false: constant
    schedule_learning_rate: bool | str = define(
        boolean(*_SCHEDULES, *(name for name in DECAYS if name not in _SCHEDULES)),
        False,
        converter=lambda value: _SCHEDULES.get(value, value) if isinstance(value, str) else value,
    )
    warmup_period_percent: float = define(number(0.0, 100.0), 0.0)  # of all steps
    # of all steps, of a "warmup_stable_decay"; null: 20
    decay_period_percent: float | None = define(optional(number(0.0, 100.0, above=True)), None)
    # of the peak, at the last step; null: 10 of a cosine, 0 of any other decay
    final_learning_rate_percent: float | None = define(optional(number(0.0, 100.0)), None)
    weight_decay: float = define(number(0.0), 0.1)
    adam_beta1: float = define(number(0.0, 0.99999), 0.9)
    adam_beta2: float = define(number(0.0, 0.99999), 0.999)
    muon_split_qkv: bool = define(boolean(), False)  # queries, keys and values as three matrices
    muon_momentum: float = define(number(0.0, 0.99999), 0.95)  # after its warm-up
    muon_momentum_warmup_steps: int = define(integer(0), 0)
    muon_first_momentum: float | None = define(optional(number(0.0, 0.99999)), None)  # of a warm-up; null: 0.85
    # global L2 norm; null: no clipping
    clipping_max_norm: float | None = define(optional(number(0.0, above=True)), None)

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
    checkpoint_interval: int = define(integer(1), 500, plumbing=True)  # steps
    keep_checkpoints: int = define(integer(1), 3, plumbing=True)  # newest ones; the best is kept beside them
    checkpoints: str | None = define(_BUCKET, None, plumbing=True)  # s3://BUCKET/PREFIX that receives them, too


@attrs.frozen(kw_only=True)
class ValidationOptions:
    validation_interval: int | None = define(optional(integer(1)), 500, plumbing=True)  # steps; null: none
    validation_sequences: int = define(integer(1, 1 << 30), 1024, plumbing=True)
    start_val_token: int = define(integer(0), 0, plumbing=True)  # in the validation stream
    # checkpoints without a new best validation loss after which the run ends; null: it trains all its steps
    patience: int | None = define(optional(integer(1)), None)


@attrs.frozen(kw_only=True)
class ExecutionOptions:
    parallel: str = define(one_of("ddp", "fsdp", "hsdp"), "ddp", plumbing=True)
    tensor_parallel: int = define(integer(1, 1024), 1, plumbing=True)  # neighboring ranks that share each layer
    # parts in which a layer is computed, whatever the ranks: they change the bits; null: tensor_parallel
    tensor_shards: int | None = define(optional(integer(1, 1024)), None, plumbing=True)
    # null: elastic on a CPU where the world size allows it, off on a GPU
    determinism: str | None = define(optional(one_of("off", "run", "elastic")), None, plumbing=True)
    cpu_threads: int = define(integer(1, 1024), 1, plumbing=True)  # per rank on a CPU; they change the bits
    precision: str = define(one_of("auto", "bf16", "fp16", "fp32"), "auto")
    # true: block by block; "model": as one graph; null: true on a GPU, false on a CPU
    compile: bool | str | None = define(optional(boolean("model")), None, plumbing=True)

    def __attrs_post_init__(self) -> None:
        set_one_form(self, tensor_shards=self.tensor_parallel)

    @property
    def shards(self) -> int:
        return self.tensor_shards or self.tensor_parallel


@attrs.frozen(kw_only=True)
class MemoryOptions:
    """Memory options: settings that trade compute for memory."""

    loss_chunks: int = define(integer(1, 1 << 20), 1, plumbing=True)  # parts of a micro-batch's logits, one at a time
    recompute_blocks: bool = define(boolean(), False, plumbing=True)  # activations of blocks in the backward pass
