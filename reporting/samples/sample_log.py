"""Sample log, `samples.jsonl`: what each checkpoint generated, and how likely it found each token of a held-out text.

Append-only, one line for each checkpoint, written while the checkpoint is on the disk. `read_samples` returns the lines
that belong to the run as it stands.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import numpy as np

from common.errors import LARGEST_INTEGER
from common.json_files import JsonLines, read_json_lines, read_regular
from common.structure import structured
from training.checkpoints.directory import MANIFEST, WEIGHTS, checkpoints_of, steps_in
from training.checkpoints.verification import manifest_entries
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
    """One line: a checkpoint's samples. Its first token of the text is not predicted."""

    step: int
    name: str
    weights_sha256: str
    starts: int  # jobs that had begun when it was recorded: a later one may supersede it
    said: list[Said]
    held_out: HeldOutText | None  # None: the run's tokens were not at hand
    log_probabilities: list[float | None] | None  # nats of ids 1, 2, ...; None where not finite
    problem: str | None = None  # why there is nothing to show

    @property
    def mean_nats(self) -> float | None:
        """Mean surprise of the text's tokens, in nats; None where none is known."""
        known = [value for value in self.log_probabilities or [] if value is not None]
        return -math.fsum(known) / len(known) if known else None


def read_samples(run: Path) -> tuple[list[CheckpointSample], JsonLines]:
    """Return the samples of a run as it stands, by step: the newest of each step, none of superseded steps.

    And the log, with the lines that are left out. Raises BadInput where it or the metrics cannot be read at all.
    """
    parsed, lines = read_json_lines(run / SAMPLES).parsed(_parsed)
    starts = read_starts(run) if parsed else []
    weights = weights_on_disk(run) if parsed else {}
    samples: dict[int, CheckpointSample] = {}
    for sample in parsed:
        if any(step < sample.step for step in starts[sample.starts :]):
            continue
        if weights.get(sample.name, sample.weights_sha256) == sample.weights_sha256:
            samples[sample.step] = sample
    return [samples[step] for step in sorted(samples)], lines


def spaced(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most so many of the items, evenly spaced, the first and the last among them."""
    chosen = np.linspace(0, len(items) - 1, min(most, len(items))).round()
    return [items[int(number)] for number in chosen]


def weights_on_disk(run: Path) -> dict[str, str]:
    """Return the sha256 of each checkpoint's weights by its manifest; one that vanishes meanwhile is left out."""
    directory = checkpoints_of(run)
    found = {}
    for name in steps_in(directory):
        try:
            found[name] = manifest_entries(read_regular(directory / name / MANIFEST))[WEIGHTS].sha256
        except (OSError, ValueError, KeyError, TypeError):  # deleted a moment ago, or damaged: not to be sampled
            continue
    return found


def _parsed(record: dict[str, Any]) -> CheckpointSample | None:
    """Return a line as a sample; None for a damaged one."""
    try:
        sample = structured(record, CheckpointSample, unknown_keys=True)
    except (ValueError, TypeError, KeyError):
        return None
    if not 0 <= sample.step <= LARGEST_INTEGER or sample.starts < 0:
        return None
    text, values = sample.held_out, sample.log_probabilities or []
    # fp32 may round to a little above 0
    if not all(value is None or value < 1 for value in values):
        return None
    if text is None:
        return sample
    whole = len(text.ids) == len(text.tokens) and len(values) == len(text.ids) - 1 and text.window > 0
    if not whole or any(max(token, default="") > "\xff" for token in text.tokens):
        return None
    source = ": ".join(Path(part).name for part in text.source.split(": "))  # no folders: the page may be published
    return attrs.evolve(sample, held_out=attrs.evolve(text, source=source))
