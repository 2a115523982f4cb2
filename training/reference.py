"""Reference of a run directory, `reference.json`: runs of which recipe and tokens it is for."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.checks import structured
from common.errors import BadInput
from common.json_files import read_json
from tokens.format.manifest import read_manifest
from training.checkpoints.run_record import RunRecord
from training.config.train_config import KEYS, recipe
from training.telemetry.loss_band import Reference
from training.telemetry.metrics_log import REFERENCE


def read_reference(directory: Path, record: RunRecord) -> tuple[Reference | None, str]:
    """Return a run directory's reference, if it is one for this run, and a line about it."""
    path = directory / REFERENCE
    try:
        reference = structured(read_json(path), Reference, unknown_keys=True)
        if problem := "; ".join(_problems(reference, record)):
            raise ValueError(problem)
    except (BadInput, ValueError) as error:
        return None, f"NOTE: {path}: the loss is not compared: {error}"
    return reference, f"band         of {len(reference.losses)} runs on {', '.join(reference.devices)}: {path}"


def recipe_of(record: RunRecord) -> dict[str, dict[str, Any]]:
    """Return the recipe of a run, without the name of a single dataset."""
    found, origin = recipe(record.model, record.train), record.initial_weights
    train = found["train"] | {"global_batch_size": record.global_batch_size}
    train["initial_weights"] = origin and origin.sha256
    if isinstance(train["dataset"], str):
        del train["dataset"]
    return found | {"train": train}


def content_of(record: RunRecord) -> str | None:
    """Return the identity of a run's training tokens; None of those that were still being prepared."""
    files = [stream.sha256 for stream in record.train_streams]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16] if files and all(files) else None


def preparation_of(record: RunRecord) -> str | None:
    """Return sources and tokenizer of a run's training tokens; None where their manifests are not at hand."""
    try:
        manifests = [read_manifest(Path(stream.directory)) for stream in record.train_streams]
    except BadInput:
        return None
    names = [each and f"{', '.join(one.name for one in each.sources)} as {each.tokenizer.name}" for each in manifests]
    return None if None in names else " + ".join(map(str, names))


def _problems(reference: Reference, record: RunRecord) -> Iterator[str]:
    """Yield the differences of a run's recipe and tokens."""
    for section, keys in recipe_of(record).items():
        for key, value in keys.items():
            own = reference.recipe.get(section, {}).get(key, getattr(KEYS[section].get(key), "default", None))
            if value != own:
                yield f"{key} is {json.dumps(value)}, there {json.dumps(own)}"
    if record.train["log_interval"] > reference.log_interval:
        yield f"log_interval is {record.train['log_interval']}, there {reference.log_interval}"
    alike = reference.prepared is not None and reference.prepared == preparation_of(record)
    if content_of(record) not in reference.tokens and not alike:
        yield "no reference for these tokens"
