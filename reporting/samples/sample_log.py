"""Sample log, `samples.jsonl`: what each checkpoint generated, and how likely it found each token of a held-out text.

Append-only, one line for each checkpoint, written while the checkpoint is on the disk. `read_samples` returns the lines
that belong to the run as it stands.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from common.json_files import read_json_lines
from common.structure import structured
from training.checkpoints.checkpoint_manifest import manifest_entries
from training.checkpoints.disk import checkpoints_of
from training.checkpoints.storage import MANIFEST, WEIGHTS, steps_in
from training.telemetry.metrics_log import SAMPLES, read_starts

Item = TypeVar("Item")


@attrs.frozen(kw_only=True)
class Said:
    """A continuation of a prompt."""

    prompt: str
    temperature: float  # 0: the most likely token each time
    text: str


@attrs.frozen(kw_only=True)
class HeldOutText:
    """A text that the run does not train on, as tokens."""

    source: str  # where its tokens were read
    ids: list[int]
    tokens: list[str]  # the bytes of each, as Latin-1; the end of text is ""
    window: int  # tokens that are predicted together: the first of each window has no context but one token


@attrs.frozen(kw_only=True)
class CheckpointSample:
    """One line: what a checkpoint said. Its first token of the text is not predicted."""

    step: int
    name: str
    weights_sha256: str
    starts: int  # jobs that had begun when it was recorded: a later one may supersede it
    said: list[Said]
    held_out: HeldOutText | None  # None: the run's tokens were not at hand
    log_probabilities: list[float | None] | None  # nats of ids 1, 2, ...; None where not finite
    problem: str | None = None  # why there is nothing to show


def read_samples(run: Path) -> list[CheckpointSample]:
    """Return the samples of a run as it stands, by step: the newest of each step, none of superseded steps.

    Raises BadInput where the log or the metrics cannot be read at all.
    """
    if not (run / SAMPLES).exists():
        return []
    starts = read_starts(run)
    weights = weights_on_disk(run)
    samples: dict[int, CheckpointSample] = {}
    for record in read_json_lines(run / SAMPLES).records:
        sample = _parsed(record)
        if sample is None or any(step < sample.step for step in starts[sample.starts :]):
            continue
        if weights.get(sample.name, sample.weights_sha256) == sample.weights_sha256:
            samples[sample.step] = sample
    return [samples[step] for step in sorted(samples)]


def spaced(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most so many of the items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def weights_on_disk(run: Path) -> dict[str, str]:
    """Return the sha256 of each checkpoint's weights by its manifest; one that vanishes meanwhile is left out."""
    storage = checkpoints_of(run)
    found = {}
    for name in steps_in(storage):
        try:
            found[name] = manifest_entries(storage.local_file(name, MANIFEST).read_bytes())[WEIGHTS].sha256
        except (OSError, ValueError, KeyError, TypeError):  # deleted a moment ago, or damaged: not to be sampled
            continue
    return found


def _parsed(record: dict[str, Any]) -> CheckpointSample | None:
    """Return a line as a sample; None for a damaged one."""
    try:
        sample = structured(record, CheckpointSample, unknown_keys=True)
    except (ValueError, TypeError, KeyError):
        return None
    text, values = sample.held_out, sample.log_probabilities
    if text is not None and (len(text.ids) != len(text.tokens) or len(values or []) != len(text.ids) - 1):
        return None
    return sample
