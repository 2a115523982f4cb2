"""Range of tokens for the held-out loss: chosen beyond what a run has read, identified by its content."""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.errors import BadInput
from common.files import sha256
from common.output import note, show
from evaluation.command_line import LossCommand, RangeName
from evaluation.loss.loss_measures import NAMED_RANGES, VALIDATION_RANGES
from evaluation.shared.model_location import ModelLocation
from tokens.format.foreign_files import describe_missing_first
from tokens.format.manifest import read_manifest
from tokens.format.token_file import TokenStream, open_split
from tokens.hub.download import download_dataset, hub_name
from training.checkpoints.run_record import StreamRecord
from training.checkpoints.saved_state import read_state
from training.data.locate_tokens import DOWNLOADS

DEFAULT = NAMED_RANGES["gpjt-test"]
COMPARED_TOKENS = 1 << 20  # at the beginning of two streams, which tell whether they hold the same tokens


READ_TOKENS = 1 << 16  # at a time, in search of the end of a document


@attrs.frozen(kw_only=True)
class Range:
    """A range of a split: tokens start + 1 .. start + count are predicted."""

    directory: Path
    split: str
    start: int
    count: int
    name: RangeName | None = None

    def __str__(self) -> str:
        name = "" if self.name is None else f"{self.name}: "
        return f"{name}{self.directory}: {self.split}, tokens {self.start:,} to {self.start + self.count:,}"

    def identity(self) -> dict[str, Any]:
        """Return its identity as JSON: its position, the sha256 of its tokens as 32-bit integers, and of weights."""
        stream = open_split(self.directory, self.split)
        tokens, weights = stream.read(self.start, self.count + 1), np.empty(self.count * stream.weighted, np.uint8)
        stream.read_weights_into(weights, self.start + 1)
        return {
            "tokens": str(self.directory),
            "dataset": hub_name(self.directory),
            "split": self.split,
            "start": self.start,
            "count": self.count,
            "sha256": hashlib.sha256(tokens.astype("<u4").tobytes() + weights.tobytes()).hexdigest(),
        }


def choose(command: LossCommand, places: list[ModelLocation]) -> tuple[Range, dict[str, Any]]:
    """Return the range of a command line, unseen by all models, and its identity. Raises BadInput."""
    if command.name is None:
        if command.tokens is None:
            recorded = (place.job.token_directories for place in places)
            directories = next(filter(None, recorded), ())
        else:
            directories = (command.tokens,)
        if len(directories) != 1:
            raise BadInput(f"{places[0].path}: names no single token directory; pass --tokens DIR")
        span = choose_range(directories[0], command.split or "validation", command.start, command.count, places)
    else:
        span = choose_named(command.name, command.tokens, places)
    for place in places:
        check_unseen(place, span)
    show(str(span), *describe_missing_first(span.directory, open_split(span.directory, span.split).files))
    return span, span.identity()


def choose_range(
    directory: Path, split: str, start: int | None, count: int | None, places: list[ModelLocation]
) -> Range:
    """Return the requested range, else gpjt's, or what follows the validated tokens. Raises BadInput without any."""
    stream = open_split(directory, split)
    length, row = stream.length, stream.context_length or 1
    if start is not None and start % row:
        raise BadInput(f"--from {start}: wanted a multiple of {row}, where a row in {directory} begins")
    if start is None:
        start = DEFAULT.start
        if length <= DEFAULT.start + 1:
            seen = [end for place in places for _, _, end in _seen(place, directory, split)]
            start = max((end for end in seen if end < length), default=0)
    there = length - start - 1
    if there < 1 or (count is not None and count > there):
        got = f"{directory}: its {split} stream has {length:,} tokens, wanted {count or 1:,} tokens"
        raise BadInput(f"{got} to predict after {start:,}; pass another --from or --count")
    return Range(directory=directory, split=split, start=start, count=min(there, count or DEFAULT.count))


def choose_named(name: RangeName, directory: Path | None, places: list[ModelLocation]) -> Range:
    """Return a named range, whose held-out tokens are downloaded if no directory has them. Raises BadInput."""
    named = NAMED_RANGES[name]
    if directory is None:
        directory = DOWNLOADS / named.dataset
        download_dataset(named.dataset, directory, train_tokens=0)
    elif hub_name(directory) not in (None, named.dataset):
        wanted = f"wanted {named.dataset} for --range {name}; leave out --tokens to download it"
        raise BadInput(f"{directory}: got dataset {hub_name(directory)}, {wanted}")
    return attrs.evolve(choose_range(directory, named.split, named.start, named.count, places), name=name)


def check_unseen(place: ModelLocation, span: Range) -> None:
    """Raise BadInput for a range that a model has seen; print a note where the range is there to validate on."""
    for how, begin, end in _seen(place, span.directory, span.split):
        if begin < span.start + span.count + 1 and span.start < end:
            if how == "validated" and span.name in VALIDATION_RANGES:
                show(note(f"{place.path} was validated on tokens {begin:,} to {end:,} of {span.name}"))
                continue
            seen = f"{span}: {place.path} was {how} on tokens {begin:,} to {end:,} of it"
            raise BadInput(f"{seen}; pass another --from, --count or --split")


def is_known_apart(place: ModelLocation, span: Range) -> bool:
    """Tell whether it is known that a run has not read a range, once `check_unseen` has found nothing.

    That is so for the tokens that it was validated or trained on, whose other parts it has not read, and for the other
    splits of the same preparation. Any other files may hold the same documents.
    """
    if not place.is_own:
        return False
    config, manifest = read_state(place.path).config, read_manifest(span.directory)
    if manifest is not None:
        listed = {entry.sha256 for entry in manifest.files.values()}
        for stream in config.train_streams:
            if stream.sha256 and listed.issuperset(stream.sha256):
                return True
            if stream.plan is not None and stream.plan == manifest.plan:
                return True
    recorded = [("train", stream) for stream in config.train_streams]
    recorded += [("validation", stream) for stream in config.validation_streams]
    return any(_is_same(stream, name, span.directory, span.split) for name, stream in recorded)


def documents_shared(
    validated: Sequence[StreamRecord], tokens: tuple[int, int], span: Range, end_of_text_id: int | None
) -> list[str]:
    """Return lines about documents of which a run was validated on one part and the range holds another.

    `validated`: the run's validation streams, which were read from the first of `tokens` to the second. A stream of
    conversations has no such documents, and without an end-of-text id they cannot be known.
    """
    stream = open_split(span.directory, span.split)
    same = any(_is_same(each, "validation", span.directory, span.split) for each in validated)
    if not same or stream.weighted or end_of_text_id is None:
        return []
    lines = []
    # The end of text belongs to the document before it, so it may be the last token of the one part.
    if tokens[1] <= span.start and not _has_end(stream, tokens[1], span.start + 1, end_of_text_id):
        lines.append("They begin inside the last document of that validation.")
    last = span.start + span.count
    if last <= tokens[0] and not _has_end(stream, last, tokens[0] + 1, end_of_text_id):
        lines.append("They end inside the first document of that validation.")
    return lines


def _has_end(stream: TokenStream, begin: int, end: int, end_of_text_id: int) -> bool:
    """Tell whether a document ends at one of the tokens begin .. end - 1."""
    starts = range(begin, end, READ_TOKENS)
    return any((stream.read(at, min(READ_TOKENS, end - at)) == end_of_text_id).any() for at in starts)


def _seen(place: ModelLocation, directory: Path, split: str) -> list[tuple[str, int, int]]:
    """Return the ranges of a stream that a run was trained or validated on, as known: how, first token, end."""
    if not place.is_own:
        return []
    config = read_state(place.path).config
    train = config.train
    whole, seen = open_split(directory, split), []
    last = 0 if whole.weighted else 1  # the target after a row, the first token of the next one, does not count
    for stream, source in zip(config.train_streams, config.sources or [], strict=True):
        if source["tokens"] != 0 and _is_same(stream, "train", directory, split):
            begin = train.data.start_train_token
            # Shuffled windows may lie anywhere.
            everything = train.data.shuffle or source["epochs"] is None or source["epochs"] > 1
            seen.append(("trained", begin, whole.length if everything else begin + source["tokens"] + last))
    if any(_is_same(held_out, "validation", directory, split) for held_out in config.validation_streams):
        begin, windows = train.validation.start_val_token, train.validation.validation_sequences
        seen.append(("validated", begin, begin + windows * config.model.context_length + last))
    return seen


def _is_same(recorded: StreamRecord, recorded_split: str, directory: Path, split: str) -> bool:
    """Tell whether a stream is that of a run's record, which for growing tokens has a plan in place of a sha256."""
    manifest, plan = read_manifest(directory), recorded.plan
    planned = recorded_split == split and plan is not None and manifest is not None and plan == manifest.plan
    if planned or not recorded.sha256:
        return planned
    digests = _digests(directory, split)
    shared = min(len(digests), len(recorded.sha256))  # shards may have been downloaded since
    return recorded.sha256[:shared] == digests[:shared] or _holds_same_tokens(
        recorded, recorded_split, directory, split
    )


def _holds_same_tokens(recorded: StreamRecord, recorded_split: str, directory: Path, split: str) -> bool:
    """Tell whether other files begin with the tokens of a run's stream, such as larger shards or wider integers.

    It compares tokens, so it needs the run's own files: it returns False where they are gone, or hold other tokens now.
    """
    try:
        if not recorded.directory or _digests(Path(recorded.directory), recorded_split) != recorded.sha256:
            return False
        own, other = open_split(Path(recorded.directory), recorded_split), open_split(directory, split)
    except BadInput:
        return False
    count = min(own.length, other.length, COMPARED_TOKENS)
    return count > 0 and np.array_equal(own.read(0, count), other.read(0, count))


@cache
def _digests(directory: Path, split: str) -> list[str]:
    manifest = read_manifest(directory)
    paths = [file.path for file in open_split(directory, split).files]
    if manifest is not None and all(path.name in manifest.files for path in paths):
        return [manifest.files[path.name].sha256 for path in paths]
    return [sha256(path) for path in paths]
