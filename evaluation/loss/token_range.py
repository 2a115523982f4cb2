"""Choose the range of tokens for the held-out loss, which the models must not have seen, and identify its content."""

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
from common.text import counted
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
COMPARED_TOKENS = 1 << 20  # two streams are considered the same if their first tokens, up to this number, are equal
READ_TOKENS = 1 << 16  # tokens that are read at a time while searching for the end of a document


@attrs.frozen(kw_only=True)
class Range:
    """A range of a split. The tokens from `start` + 1 to `start` + `count` are predicted."""

    directory: Path
    split: str
    start: int
    count: int
    name: RangeName | None = None

    def __str__(self) -> str:
        name = "" if self.name is None else f"{self.name}: "
        return f"{name}{self.directory}: {self.split}, tokens {self.start:,} to {self.start + self.count:,}"

    def identity(self) -> dict[str, Any]:
        """Return the identity of the range for a stored result: its position, and the sha256 of its tokens.

        The hash also covers the loss weights of the tokens. The tokens are hashed as 32-bit integers, so that the
        format of the files does not matter.
        """
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


def choose(command: LossCommand, locations: list[ModelLocation]) -> tuple[Range, dict[str, Any]]:
    """Return the range that the command line asks for, and its identity. Raises BadInput if a model has seen it."""
    if command.name is None:
        if command.tokens is None:
            recorded = (location.job.token_directories for location in locations)
            directories = next(filter(None, recorded), ())
        else:
            directories = (command.tokens,)
        if len(directories) != 1:
            raise BadInput(f"{locations[0].path}: does not name exactly one token directory; pass --tokens DIR")
        span = choose_range(directories[0], command.split or "validation", command.start, command.count, locations)
    else:
        span = choose_named(command.name, command.tokens, locations)
    for location in locations:
        check_unseen(location, span)
    show(str(span), *describe_missing_first(span.directory, open_split(span.directory, span.split).files))
    return span, span.identity()


def choose_range(
    directory: Path, split: str, start: int | None, count: int | None, locations: list[ModelLocation]
) -> Range:
    """Return the requested range of a split. Raises BadInput if the split is too short for it.

    If `start` is None, the range begins where gpjt's range does. In a split that is too short for that, it begins after
    the tokens that the models were trained or validated on. If `count` is None, the range has the size of gpjt's range,
    or extends to the end of the split.
    """
    stream = open_split(directory, split)
    length, row = stream.length, stream.context_length or 1
    if start is not None and start % row:
        raise BadInput(f"--from {start}: wanted a multiple of {row}, the length of a row in {directory}")
    if start is None:
        start = DEFAULT.start
        if length <= DEFAULT.start + 1:
            ends = [end for location in locations for _, _, end in _ranges_read(location, directory, split)]
            start = max((end for end in ends if end < length), default=0)
    available = length - start - 1
    if available < 1 or (count is not None and count > available):
        got = f"{directory}: its {split} stream has {counted(length, 'token')}"
        expected = f"wanted {counted(count or 1, 'token')} to predict after --from {start:,}"
        raise BadInput(f"{got}, {expected}; pass another --from or --count")
    return Range(directory=directory, split=split, start=start, count=min(available, count or DEFAULT.count))


def choose_named(name: RangeName, directory: Path | None, locations: list[ModelLocation]) -> Range:
    """Return a published range by its name. Raises BadInput.

    `directory`: the token directory to read; None: download the dataset without its training tokens.
    """
    named = NAMED_RANGES[name]
    if directory is None:
        directory = DOWNLOADS / named.dataset
        download_dataset(named.dataset, directory, train_tokens=0)
    elif hub_name(directory) not in (None, named.dataset):
        advice = f"wanted {named.dataset} for --range {name}; leave out --tokens to download it"
        raise BadInput(f"{directory}: got dataset {hub_name(directory)}, {advice}")
    return attrs.evolve(choose_range(directory, named.split, named.start, named.count, locations), name=name)


def check_unseen(location: ModelLocation, span: Range) -> None:
    """Raise BadInput if a model was trained or validated on tokens of a range.

    If the range is meant for validation, a model that was validated on it causes only a note.
    """
    for how, begin, end in _ranges_read(location, span.directory, span.split):
        if begin < span.start + span.count + 1 and span.start < end:
            if how == "validated" and span.name in VALIDATION_RANGES:
                show(note(f"{location.path} was validated on tokens {begin:,} to {end:,} of {span.name}"))
                continue
            problem = f"{span}: {location.path} was {how} on tokens {begin:,} to {end:,} of this split"
            raise BadInput(f"{problem}; pass another --from, --count or --split")


def is_certainly_unread(location: ModelLocation, span: Range) -> bool:
    """Return whether a run certainly has not read a range for which `check_unseen` raised no error.

    This is certain if the range is in the files that the run was trained or validated on, because it is known which
    parts of these files the run has read. It is also certain if the range is in another split that was prepared
    together with these files. All other files may contain documents that the run has read.
    """
    if not location.is_lockstep_checkpoint:
        return False
    config, manifest = read_state(location.path).config, read_manifest(span.directory)
    if manifest is not None:
        manifest_digests = {entry.sha256 for entry in manifest.files.values()}
        for stream in config.train_streams:
            if stream.sha256 and manifest_digests.issuperset(stream.sha256):
                return True
            if stream.plan is not None and stream.plan == manifest.plan:
                return True
    recorded = [("train", stream) for stream in config.train_streams]
    recorded += [("validation", stream) for stream in config.validation_streams]
    return any(_is_same(stream, name, span.directory, span.split) for name, stream in recorded)


def shared_documents(
    validated: Sequence[StreamRecord], tokens: tuple[int, int], span: Range, end_of_text_id: int | None
) -> list[str]:
    """Return lines about documents that are partly in the run's validation tokens and partly in the range.

    `validated`: the run's validation streams. `tokens`: the first validation token, and the end of the validation
    tokens. A stream of conversations does not have such documents. Without an end-of-text id, they cannot be found.
    """
    stream = open_split(span.directory, span.split)
    is_validation = any(_is_same(record, "validation", span.directory, span.split) for record in validated)
    if not is_validation or stream.weighted or end_of_text_id is None:
        return []
    lines = []
    # An end-of-text token belongs to the document before it, so the last validation token may be an end-of-text token.
    if tokens[1] <= span.start and not _has_end(stream, tokens[1], span.start + 1, end_of_text_id):
        lines.append("The tokens measured here begin inside the last document of that validation.")
    last = span.start + span.count
    if last <= tokens[0] and not _has_end(stream, last, tokens[0] + 1, end_of_text_id):
        lines.append("The tokens measured here end inside the first document of that validation.")
    return lines


def _has_end(stream: TokenStream, begin: int, end: int, end_of_text_id: int) -> bool:
    """Return whether a document ends at one of the tokens from `begin` to `end` - 1."""
    starts = range(begin, end, READ_TOKENS)
    return any((stream.read(start, min(READ_TOKENS, end - start)) == end_of_text_id).any() for start in starts)


def _ranges_read(location: ModelLocation, directory: Path, split: str) -> list[tuple[str, int, int]]:
    """Return the ranges of a stream that a run is known to have read.

    Each range has its use ("trained" or "validated"), its first token and its end.
    """
    if not location.is_lockstep_checkpoint:
        return []
    config = read_state(location.path).config
    train = config.train
    split_stream, ranges = open_split(directory, split), []
    # In a stream of conversations, a row's last target is the first token of the next row. This token has weight 0.
    last = 0 if split_stream.weighted else 1
    for stream, source in zip(config.train_streams, config.sources or [], strict=True):
        if source["tokens"] != 0 and _is_same(stream, "train", directory, split):
            begin = train.data.start_train_token
            # Shuffled windows may be anywhere in the stream.
            read_all = train.data.shuffle or source["epochs"] is None or source["epochs"] > 1
            ranges.append(("trained", begin, split_stream.length if read_all else begin + source["tokens"] + last))
    if any(_is_same(held_out, "validation", directory, split) for held_out in config.validation_streams):
        begin, windows = train.validation.start_val_token, train.validation.validation_sequences
        ranges.append(("validated", begin, begin + windows * config.model.context_length + last))
    return ranges


def _is_same(recorded: StreamRecord, recorded_split: str, directory: Path, split: str) -> bool:
    """Return whether a stream is the one that a run has recorded.

    If the tokens were still being prepared, the record has the plan of their preparation instead of a sha256.
    """
    manifest, plan = read_manifest(directory), recorded.plan
    planned = recorded_split == split and plan is not None and manifest is not None and plan == manifest.plan
    if planned or not recorded.sha256:
        return planned
    digests = _digests(directory, split)
    shared = min(len(digests), len(recorded.sha256))  # more shards may have been downloaded since
    return recorded.sha256[:shared] == digests[:shared] or _has_same_tokens(recorded, recorded_split, directory, split)


def _has_same_tokens(recorded: StreamRecord, recorded_split: str, directory: Path, split: str) -> bool:
    """Return whether a stream in different files, such as larger shards, begins with the tokens of a recorded stream.

    The tokens are compared, which requires the files that the run has read. If these files are missing or have
    changed, return False.
    """
    try:
        if not recorded.directory or _digests(Path(recorded.directory), recorded_split) != recorded.sha256:
            return False
        recorded_stream = open_split(Path(recorded.directory), recorded_split)
        stream = open_split(directory, split)
    except BadInput:
        return False
    count = min(recorded_stream.length, stream.length, COMPARED_TOKENS)
    return count > 0 and np.array_equal(recorded_stream.read(0, count), stream.read(0, count))


@cache
def _digests(directory: Path, split: str) -> list[str]:
    manifest = read_manifest(directory)
    paths = [file.path for file in open_split(directory, split).files]
    if manifest is not None and all(path.name in manifest.files for path in paths):
        return [manifest.files[path.name].sha256 for path in paths]
    return [sha256(path) for path in paths]
