"""Ladder file: a target run directory, small sizes of its network, horizons and learning rates to try."""

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
LEAST_SIZES = 3  # the largest is held out
FACTORS = (1.2, 4.0)  # least and largest distance of two rates
# The loss would be measured on other windows than the target's, or results would land in the target's bucket
FIXED = ("validation_sequences", "start_val_token", BUCKET)


@attrs.frozen(kw_only=True)
class LadderFile:
    """A ladder file, checked."""

    file: Path
    output: Path  # directory of all runs
    ranks: int  # of each run
    target: Run
    batch: int  # the target's, sequences
    microbatch_size: int  # at most, of all runs
    train: dict[str, Any]  # the target's train.json, with "set"
    sizes: tuple[ModelConfig, ...]  # rising in N, the weights in matrix products
    tokens_per_parameter: tuple[float, ...]  # horizons, rising
    rates: tuple[float, ...]  # rising
    seeds: tuple[int, ...]  # of each size


def read_ladder(file: Path, output: Path | None = None, ranks: int = 1) -> LadderFile:
    """Read a ladder file; `output`: of all runs, None: beside it. Raises BadInput, naming file and key."""
    values = read_experiment(file, KNOWN, 'wanted {"target": RUN, "sizes": [{"n_layers": 2, "emb_dim": 64}, ...], ...}')
    if not isinstance(values.get("target"), str):
        raise BadInput(f"{file}: target: got {quoted(values.get('target'))}, wanted a run directory")
    directory = Path(values["target"])
    target = changed_run(str(file), directory, {})
    batch = target.train.batch.global_batch_size
    if batch is None:
        raise BadInput(f"{file}: {directory} has no global_batch_size; set it: the batches of the sizes follow from it")
    settings = _settings(file, values.get("set", {}))
    # the batch of each size follows from the target's, in whole micro-batches, whatever `set` says of those
    changes = {"train.global_batch_size": None, **{f"train.{key}": value for key, value in settings.items()}}
    train = changed_run(f"{file}: set", directory, changes).train
    if train.validation.validation_interval is None:
        raise BadInput(f"{file}: {directory} never validates; set train.validation_interval: the law is of that loss")
    rates = _rising(file, "rates", values.get("rates"), LEAST_RATES)
    if not all(FACTORS[0] <= high / low <= FACTORS[1] for low, high in pairwise(rates)):
        raise BadInput(f"{file}: rates: got {list(rates)}, wanted each 1.2 to 4 times the one before, such as 2 times")
    return LadderFile(
        file=file,
        output=output_of(file, output),
        ranks=ranks,
        target=target,
        batch=batch,
        train=stated("train", target.train.flat()) | settings,
        sizes=_sizes(file, directory, changes, values.get("sizes")),
        tokens_per_parameter=_rising(file, "tokens_per_parameter", values.get("tokens_per_parameter"), 2),
        rates=rates,
        microbatch_size=train.batch.microbatch_size,
        seeds=read_seeds(file, 1 if values.get("seeds") is None else values["seeds"], target.train.random_seed),
    )


def size_name(model: ModelConfig) -> str:
    """Return the name of a size: layers x width."""
    return f"{model.n_layers}x{model.emb_dim}"


def stated(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that differ from their defaults."""
    return {key: value for key, value in values.items() if value != KEYS[section][key].default}


def _settings(file: Path, values: Any) -> dict[str, Any]:
    """Return the keys of train.json that all runs of the ladder have otherwise: none that changes the recipe."""
    allowed = sorted(PLUMBING_KEYS.difference(FIXED))
    if not isinstance(values, dict):
        raise BadInput(f'{file}: set: got {quoted(values)}, wanted {{"train.microbatch_size": 4}}')
    found = {}
    for name, value in values.items():
        section, key = resolve_key(name)
        if section != "train" or key not in allowed:
            raise BadInput(f"{file}: set: {quoted(name)}: wanted train. and one of {', '.join(allowed)}")
        found[key] = value
    return found


def _sizes(file: Path, target: Path, settings: Changes, values: Any) -> tuple[ModelConfig, ...]:
    if not isinstance(values, list) or len(values) < LEAST_SIZES or not all(isinstance(one, dict) for one in values):
        raise BadInput(
            f'{file}: sizes: got {quoted(values)}, wanted {LEAST_SIZES} or more of {{"n_layers": L, "emb_dim": C}}'
        )
    for key in (key for changes in values for key in changes):
        if key not in SHAPE_KEYS:
            raise BadInput(f"{file}: sizes: {quoted(key)}; {nearest(key, SHAPE_KEYS)}; wanted {', '.join(SHAPE_KEYS)}")
    found = [
        changed_run(f"{file}: sizes: {quoted(size)}", target, {f"model.{key}": size[key] for key in size} | settings)
        for size in values
    ]
    sizes = sorted((run.model for run in found), key=matmul_parameter_count)
    for one, other in pairwise(sizes):
        weights = matmul_parameter_count(other)
        if matmul_parameter_count(one) == weights or size_name(one) == size_name(other):
            raise BadInput(f"{file}: sizes: two have {size_name(other)}, or {weights:,} weights; leave one out")
    return tuple(sizes)


def _rising(file: Path, key: str, values: Any, least: int) -> tuple[float, ...]:
    numbers: Sequence[Any] = values if isinstance(values, list) else ()
    fine = all(isinstance(one, int | float) and not isinstance(one, bool) and 0 < one < 1e9 for one in numbers)
    if not fine or len(numbers) < least or any(low >= high for low, high in pairwise(numbers)):
        raise BadInput(f"{file}: {key}: got {quoted(values)}, wanted {least} or more rising numbers above 0")
    return tuple(float(one) for one in numbers)


BATCH_EXPONENT = 2 / 3
RATE_EXPONENT = -1 / 3
MOST_DEVIATION = 1.25  # factor between a target's own rate and the rule's, above which the forecast warns


def scaled_rate(rate: float, parameters: int, other: int) -> float:
    """Return the rate for a size of so many parameters, when `rate` is that of the other; four digits."""
    return rounded_rate(rate * (parameters / other) ** RATE_EXPONENT)


def rounded_rate(rate: float) -> float:
    """Return a rate as run directories have it, in four digits."""
    return float(f"{rate:.4g}")


def scaled_batch(sequences: int, parameters: int, other: int, microbatch_size: int, ranks: int) -> dict[str, int]:
    """Return a size's batch keys of train.json, `sequences` being the other's; at least a micro-batch for each rank."""
    wanted = sequences * (parameters / other) ** BATCH_EXPONENT
    size = min(microbatch_size, max(1, round(wanted / ranks)))
    return {"microbatch_size": size, "global_batch_size": size * max(ranks, round(wanted / size))}
