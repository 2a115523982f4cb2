"""A run directory's `model.json` and `train.json`: read, translated from older spellings, checked."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import attrs

from common.errors import BadInput, nearest, quoted
from common.files import is_folder
from common.json_files import parse_json, read_json
from model import checks
from model.config import ModelConfig
from model.stock import stock_class
from training.config.dataset_config import DatasetPart, read_parts
from training.config.foreign_keys import FOREIGN_KEYS, Ours

Config = TypeVar("Config")
_WANTED = "a run directory holds model.json and train.json, each a JSON object"

# Keys that leave the trained weights as they are, but for rounding. Runs that differ in nothing but these and the seed
# are one recipe: evaluate.py compare takes their difference for noise.
PLUMBING_KEYS = frozenset(
    {
        "microbatch_size",
        "gradient_accumulation_steps",
        "max_epochs",  # the number of steps tells what was read
        "checkpoint_interval",
        "keep_checkpoints",
        "validation_interval",
        "validation_sequences",
        "start_val_token",
        "log_interval",
        "parallel",
        "determinism",
        "cpu_threads",
        "compile",
        "loss_chunks",
        "recompute_blocks",
        "timeout_seconds",
    }
)

OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for the matrices of the blocks, AdamW for all else"}


@attrs.frozen(kw_only=True)
class Thrift:
    """What of train.json changes how much memory a run holds."""

    loss_chunks: int = 1
    recompute_blocks: bool = False
    muon: bool = False  # holds one moment of a matrix, not two


@attrs.frozen(kw_only=True)
class TrainConfig:
    """The fields of `train.json`. What a directory leaves out means what it meant to its author.

    Spellings and defaults are those of gpjt/ddp-base-model-from-scratch where it has the key.
    """

    # Data: a hub dataset or a local directory of token files, or several with weights, and where to begin in each
    dataset: str | list[dict[str, Any]] = attrs.field(validator=lambda _, __, value: _check_dataset(value))
    min_train_tokens: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(1)))
    start_train_token: int = attrs.field(default=0, validator=checks.integer(0))
    max_epochs: int = attrs.field(
        default=1, validator=checks.integer(1)
    )  # times that a window may be read; the number of steps tells how many it was
    era_tokens: int | None = attrs.field(
        default=None, validator=checks.optional(checks.integer(1))
    )  # shuffle inside eras of so many tokens; null: over the whole stream
    shuffle: bool = attrs.field(default=False, validator=checks.boolean())  # windows in a seeded order
    # Batch, in sequences: the global batch is science, the micro-batch is what fits
    microbatch_size: int = attrs.field(validator=checks.integer(1, 1 << 20))
    global_batch_size: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(1, 1 << 30)))
    gradient_accumulation_steps: int | None = attrs.field(
        default=None, validator=checks.optional(checks.integer(1, 1 << 20))
    )
    # Optimizer: AdamW, or Muon for the matrices of the blocks; decay on matrices only
    optimizer: str = attrs.field(default="adamw", validator=checks.one_of(*OPTIMIZERS))
    learning_rate: float = attrs.field(default=4e-4, validator=checks.number(0.0, above=True))
    schedule_learning_rate: bool = attrs.field(default=False, validator=checks.boolean())  # warm-up, then cosine
    warmup_period_percent: float = attrs.field(default=0, validator=checks.number(0.0, 100.0))  # of all steps
    weight_decay: float = attrs.field(default=0.1, validator=checks.number(0.0))
    adam_beta1: float = attrs.field(default=0.9, validator=checks.number(0.0, 0.99999))
    adam_beta2: float = attrs.field(default=0.999, validator=checks.number(0.0, 0.99999))
    clipping_max_norm: float | None = attrs.field(
        default=None, validator=checks.optional(checks.number(0.0, above=True))
    )  # null: no clipping
    # A loss or gradient norm far above those of the steps before; null: only what is not finite is held back
    on_spike: str | None = attrs.field(default=None, validator=checks.optional(checks.one_of("stop", "skip")))
    spike_window: int = attrs.field(default=128, validator=checks.integer(2, 1 << 20))  # steps
    spike_zscore: float = attrs.field(default=6.0, validator=checks.number(0.0, above=True))  # standard deviations
    # Intervals, in steps
    checkpoint_interval: int = attrs.field(default=500, validator=checks.integer(1))
    keep_checkpoints: int = attrs.field(default=3, validator=checks.integer(1))  # newest ones, and the best beside them
    validation_interval: int | None = attrs.field(
        default=500, validator=checks.optional(checks.integer(1))
    )  # null: no validation
    validation_sequences: int = attrs.field(default=1024, validator=checks.integer(1, 1 << 30))
    start_val_token: int = attrs.field(default=0, validator=checks.integer(0))
    log_interval: int = attrs.field(default=10, validator=checks.integer(1))  # each logged step waits for the GPU once
    # How it runs
    random_seed: int = attrs.field(default=42, validator=checks.integer(0))
    parallel: str = attrs.field(default="ddp", validator=checks.one_of("ddp", "fsdp"))
    determinism: str | None = attrs.field(
        default=None, validator=checks.optional(checks.one_of("off", "run", "elastic"))
    )  # null: elastic on a CPU where the world size allows it, off on a GPU
    cpu_threads: int = attrs.field(
        default=1, validator=checks.integer(1, 1024)
    )  # of a rank on a CPU: they change the bits
    precision: str = attrs.field(default="auto", validator=checks.one_of("auto", "bf16", "fp16", "fp32"))
    compile: bool | str | None = attrs.field(
        default=None, validator=checks.optional(checks.boolean_or("model"))
    )  # true: block by block; "model": as one graph; null: true on a GPU, false on a CPU
    loss_chunks: int = attrs.field(
        default=1, validator=checks.integer(1, 1 << 20)
    )  # of a micro-batch's logits, one at a time
    recompute_blocks: bool = attrs.field(default=False, validator=checks.boolean())  # instead of keeping activations
    timeout_seconds: int = attrs.field(default=600, validator=checks.integer(10, 30 * 86400))  # of one collective

    @property
    def parts(self) -> tuple[DatasetPart, ...]:
        """The datasets and their weights."""
        return read_parts(self.dataset)

    @property
    def thrift(self) -> Thrift:
        """What the run does to hold less memory."""
        return Thrift(
            loss_chunks=self.loss_chunks, recompute_blocks=self.recompute_blocks, muon=self.optimizer == "muon"
        )


@attrs.frozen(kw_only=True)
class Run:
    """A run directory, read and checked."""

    directory: Path
    model: ModelConfig
    train: TrainConfig
    notices: tuple[str, ...]  # what the user should know about translated or meaningless keys


def load_run(directory: Path, overrides: list[str]) -> Run:
    """Read a run directory; each override is "KEY=VALUE", "train.KEY=VALUE" or "model.KEY=VALUE".

    Raises BadInput naming the file and the key of whatever is missing, unknown or out of range.
    """
    if not is_folder(directory):
        raise BadInput(f"{directory}: no such run directory; wanted a folder with model.json and train.json")
    if not str(directory).isascii() and str(directory) != os.fsencode(directory).decode(errors="replace"):
        raise BadInput(f"{directory}: its name is not UTF-8, and so the checkpoints in it could not be read; rename it")
    model_file, train_file = directory / "model.json", directory / "train.json"
    values = {file.stem: read_json(file, advice=_WANTED) for file in (model_file, train_file)}
    overridden = {_apply(override, values) for override in overrides}
    notices = _translate(values["model"], values["train"], model_file, train_file)
    model = _build(ModelConfig, values["model"], model_file, overridden)
    train = _build(TrainConfig, values["train"], train_file, overridden)
    _check_together(model, train, train_file)
    stock_class(model, str(model_file))  # what could not be exported is refused before it is trained
    return Run(directory=directory, model=model, train=train, notices=tuple(notices))


def _apply(override: str, values: dict[str, dict[str, Any]]) -> str:
    """Put an override in place; return its key."""
    name, equals, text = override.partition("=")
    section, _, key = name.rpartition(".")
    section = section or "train"
    if not equals or not key or section not in values:
        raise BadInput(f"--set {quoted(override)}: wanted train.KEY=VALUE or model.KEY=VALUE")
    try:
        values[section][key] = parse_json(text, kind=None)
    except ValueError:
        values[section][key] = text  # a bare word is a string
    return key


def _translate(model: dict[str, Any], train: dict[str, Any], model_file: Path, train_file: Path) -> list[str]:
    """Replace older spellings of gpjt/ddp-base-model-from-scratch in place; return a line for each."""
    notices = []
    if "moe" in model:
        raise BadInput(f"{model_file}: key 'moe': mixtures of experts are not GPT-2; Lockstep trains dense models only")
    if "minibatch_size" in train:
        size = train.pop("minibatch_size")
        if train.setdefault("microbatch_size", size) != size:
            raise BadInput(
                f"{train_file}: minibatch_size {quoted(size)} is the old name of microbatch_size; keep one of them"
            )
        notices.append(f"{train_file}: minibatch_size {size} is read as microbatch_size")
    if "use_amp" in train:
        use_amp = train.pop("use_amp")
        precision = train.setdefault("precision", "auto" if use_amp else "fp32")
        notices.append(f"{train_file}: use_amp {json.dumps(use_amp)[:100]} is read as precision {precision}")
    if "validation_batches" in train:
        batches, size = train.pop("validation_batches"), train.get("microbatch_size")
        if "validation_sequences" in train:
            raise BadInput(f"{train_file}: validation_batches and validation_sequences say the same; keep the latter")
        if type(batches) is not int or type(size) is not int:
            raise BadInput(
                f"{train_file}: validation_batches: got {quoted(batches)}, wanted a whole number of micro-batches"
            )
        train["validation_sequences"] = batches * size
        notices.append(
            f"{train_file}: validation_batches {batches} of {size} are read as validation_sequences {batches * size}"
        )
    return notices


def _build(kind: type[Config], values: dict[str, Any], path: Path, overridden: set[str]) -> Config:
    fields = attrs.fields_dict(kind)  # type: ignore[arg-type]  # both callers pass attrs classes
    for key, value in values.items():
        if key not in fields:
            where = "--set" if key in overridden else str(path)
            raise BadInput(f"{where}: unknown key {quoted(key)}{_hint(key, value, kind, overridden)}")
    for key, field in fields.items():
        if key not in values and field.default is attrs.NOTHING:
            raise BadInput(f"{path}: key '{key}' is missing")
    try:
        return kind(**values)
    except ValueError as error:  # our validators': "KEY: got ..., wanted ..."
        where = "--set" if str(error).partition(":")[0] in overridden else str(path)
        raise BadInput(f"{where}: {error}") from error


def _hint(key: str, value: Any, kind: type, overridden: set[str]) -> str:
    """Return what an unknown key may have meant: a key of the other file, another program's, or the nearest one."""
    kinds = {"model": ModelConfig, "train": TrainConfig}
    elsewhere = next((Ours(f"{name}.{key}") for name, other in kinds.items() if key in attrs.fields_dict(other)), None)
    ours = elsewhere or FOREIGN_KEYS.get(key)
    if ours is None:
        return nearest(key, attrs.fields_dict(kind))
    if ours.key is None:
        return f"; there is no such key here: {ours.note}"
    if ours.note:
        return f"; here it is {ours.key}, {ours.note}"
    section, _, name = ours.key.partition(".")
    if key in overridden:
        return f"; did you mean --set {ours.key}={value if isinstance(value, str) else json.dumps(value)}?"
    return f"; did you mean '{name}'" + ("?" if kinds[section] is kind else f" of {section}.json?")


def _check_dataset(value: Any) -> None:
    read_parts(value)


def _check_together(model: ModelConfig, train: TrainConfig, path: Path) -> None:
    if train.global_batch_size is not None and train.global_batch_size % train.microbatch_size:
        raise BadInput(
            f"{path}: global_batch_size: got {train.global_batch_size}, "
            f"wanted a multiple of microbatch_size, {train.microbatch_size}"
        )
    if train.optimizer == "muon" and train.parallel == "fsdp":
        raise BadInput(
            f'{path}: parallel: got "fsdp", wanted "ddp", because optimizer is "muon": it needs whole matrices, and '
            "FSDP gives a rank some rows of each; set parallel to ddp, or optimizer to adamw"
        )
    if train.min_train_tokens is None and not isinstance(train.dataset, str):
        raise BadInput(
            f"{path}: min_train_tokens: got null (all tokens), wanted a number, because dataset is a list: its sources "
            "end at different times; set min_train_tokens"
        )
    if train.era_tokens is not None and train.era_tokens < model.context_length:
        raise BadInput(
            f"{path}: era_tokens: got {train.era_tokens}, wanted at least context_length {model.context_length}, and "
            "better some thousand times as many: an era is what is shuffled at a time"
        )
    if train.compile == "model" and train.parallel == "fsdp":
        raise BadInput(
            f'{path}: compile: got "model" with parallel "fsdp", wanted true: FSDP gathers the weights of one block at '
            "a time, between graphs"
        )
    if train.era_tokens is not None and not train.shuffle:
        raise BadInput(f"{path}: era_tokens: got {train.era_tokens}, wanted null, or shuffle true: eras are shuffled")
