"""The ladder file: a target run directory, small sizes of its network, and horizons and learning rates to try."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput
from common.text import nearest, quoted
from experiments.shared.experiment_files import BUCKET, Changes, changed_run, output_of, read_experiment, read_seeds
from model.config import ModelConfig
from model.counts import matmul_parameter_count
from training.config.train_config import KEYS, PLUMBING_KEYS, Run, resolve_key

KNOWN = ("target", "sizes", "tokens_per_parameter", "rates", "seeds", "set")
SHAPE_KEYS = ("n_layers", "emb_dim", "n_heads", "n_kv_heads", "mlp_width")
LEAST_RATES = 2
LEAST_SIZES = 3  # including the largest size, which is held out
FACTORS = (1.2, 4.0)  # smallest and largest ratio of a learning rate to the next lower rate
# "set" cannot change these keys. If it could, the loss might be measured on windows other than the target's, or
# checkpoints might be uploaded to the target's bucket.
FIXED = ("validation_sequences", "start_val_token", BUCKET)


@attrs.frozen(kw_only=True)
class LadderFile:
    """A ladder file after all checks."""

    file: Path
    output: Path  # directory of all runs
    ranks: int  # number of ranks of each run
    target: Run
    batch: int  # sequences in the target's global batch
    microbatch_size: int  # upper limit for all runs
    train: dict[str, Any]  # the target's train.json, with the changes of "set"
    sizes: tuple[ModelConfig, ...]  # ascending in N, the weights in matrix products
    tokens_per_parameter: tuple[float, ...]  # horizons, ascending
    rates: tuple[float, ...]  # learning rates, ascending
    seeds: tuple[int, ...]  # each size is trained with all seeds


def read_ladder(file: Path, output: Path | None = None, ranks: int = 1) -> LadderFile:
    """Read a ladder file. `output` is the directory of all runs; by default, it is the file's name without .json.

    Raise BadInput if the file is invalid; the error names the file and the key.
    """
    advice = 'expected {"target": RUN, "sizes": [{"n_layers": 2, "emb_dim": 64}, ...], ...}'
    values = read_experiment(file, KNOWN, advice)
    if not isinstance(values.get("target"), str):
        raise BadInput(f"{file}: target: got {quoted(values.get('target'))}, expected a run directory")
    directory = Path(values["target"])
    target = changed_run(str(file), directory, {})
    batch = target.train.batch.global_batch_size
    if batch is None:
        raise BadInput(
            f"{file}: {directory} has no global_batch_size; set this key, because the batch of each size is computed "
            "from its value"
        )
    settings = _settings(file, values.get("set", {}))
    # The global batch is removed because `set` may change the micro-batch. Each size gets its own global batch, which
    # is computed from the target's and is a multiple of this micro-batch.
    changes = {"train.global_batch_size": None, **{f"train.{key}": value for key, value in settings.items()}}
    train = changed_run(f"{file}: set", directory, changes).train
    if train.validation.validation_interval is None:
        raise BadInput(
            f"{file}: {directory} never validates, but the law needs the validation loss; set train.validation_interval"
        )
    rates = _ascending(file, "rates", values.get("rates"), LEAST_RATES)
    if not all(FACTORS[0] <= high / low <= FACTORS[1] for low, high in pairwise(rates)):
        raise BadInput(
            f"{file}: rates: got {list(rates)}, but each rate must be 1.2 to 4 times the previous rate, for example 2 "
            "times"
        )
    return LadderFile(
        file=file,
        output=output_of(file, output),
        ranks=ranks,
        target=target,
        batch=batch,
        train=stated("train", target.train.flat()) | settings,
        sizes=_sizes(file, directory, changes, values.get("sizes")),
        tokens_per_parameter=_ascending(file, "tokens_per_parameter", values.get("tokens_per_parameter"), 2),
        rates=rates,
        microbatch_size=train.batch.microbatch_size,
        seeds=read_seeds(file, 1 if values.get("seeds") is None else values["seeds"], target.train.random_seed),
    )


def size_name(model: ModelConfig) -> str:
    """Return the name of a size, LAYERSxWIDTH."""
    return f"{model.n_layers}x{model.emb_dim}"


def stated(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys and values that differ from the defaults."""
    return {key: value for key, value in values.items() if value != KEYS[section][key].default}


def _settings(file: Path, values: Any) -> dict[str, Any]:
    """Return the settings of train.json that "set" changes for all runs. "set" cannot change the recipe."""
    allowed = sorted(PLUMBING_KEYS.difference(FIXED))
    if not isinstance(values, dict):
        raise BadInput(f'{file}: set: got {quoted(values)}, expected {{"train.microbatch_size": 4}}')
    settings = {}
    for name, value in values.items():
        section, key = resolve_key(name)
        if section != "train" or key not in allowed:
            raise BadInput(
                f'{file}: set: {quoted(name)}: cannot be changed for a ladder; expected "train." followed by one of '
                f"{', '.join(allowed)}"
            )
        settings[key] = value
    return settings


def _sizes(file: Path, target: Path, settings: Changes, values: Any) -> tuple[ModelConfig, ...]:
    if not isinstance(values, list) or len(values) < LEAST_SIZES or not all(isinstance(size, dict) for size in values):
        raise BadInput(
            f"{file}: sizes: got {quoted(values)}, expected {LEAST_SIZES} or more sizes such as "
            '{"n_layers": L, "emb_dim": C}'
        )
    for key in (key for changes in values for key in changes):
        if key not in SHAPE_KEYS:
            raise BadInput(
                f"{file}: sizes: {quoted(key)}; {nearest(key, SHAPE_KEYS)}; expected one of {', '.join(SHAPE_KEYS)}"
            )
    runs = [
        changed_run(f"{file}: sizes: {quoted(size)}", target, {f"model.{key}": size[key] for key in size} | settings)
        for size in values
    ]
    sizes = sorted((run.model for run in runs), key=matmul_parameter_count)
    for smaller, larger in pairwise(sizes):
        weights = matmul_parameter_count(larger)
        if matmul_parameter_count(smaller) == weights or size_name(smaller) == size_name(larger):
            raise BadInput(
                f"{file}: sizes: two sizes have the same name, {size_name(larger)}, or the same number of weights, "
                f"{weights:,}; remove one of them"
            )
    return tuple(sizes)


def _ascending(file: Path, key: str, values: Any, least: int) -> tuple[float, ...]:
    numbers: Sequence[Any] = values if isinstance(values, list) else ()
    valid = all(
        isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < 1e9 for number in numbers
    )
    if not valid or len(numbers) < least or any(low >= high for low, high in pairwise(numbers)):
        raise BadInput(
            f"{file}: {key}: got {quoted(values)}, expected a list of {least} or more ascending numbers above 0"
        )
    return tuple(float(number) for number in numbers)


BATCH_EXPONENT = 2 / 3
RATE_EXPONENT = -1 / 3
# The forecast warns if the target's learning rate differs from the rule's learning rate by more than this factor.
MOST_DEVIATION = 1.25


def scaled_rate(rate: float, parameters: int, base_parameters: int) -> float:
    """Return the learning rate for a network with `parameters`, rounded to four digits.

    It is scaled from `rate`, which is the learning rate for a network with `base_parameters`.
    """
    return rounded_rate(rate * (parameters / base_parameters) ** RATE_EXPONENT)


def rounded_rate(rate: float) -> float:
    """Round a learning rate to four digits, as in run directories."""
    return float(f"{rate:.4g}")


def scaled_batch(
    sequences: int, parameters: int, base_parameters: int, microbatch_size: int, ranks: int
) -> dict[str, int]:
    """Return the batch keys of train.json for a network with `parameters`.

    The batch is scaled from `sequences`, which is the batch for a network with `base_parameters`. It is a multiple of
    the micro-batch and has at least one micro-batch for each rank.
    """
    scaled_sequences = sequences * (parameters / base_parameters) ** BATCH_EXPONENT
    size = min(microbatch_size, max(1, round(scaled_sequences / ranks)))
    return {"microbatch_size": size, "global_batch_size": size * max(ranks, round(scaled_sequences / size))}
