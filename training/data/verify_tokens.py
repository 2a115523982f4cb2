"""Verification of a run's token files.

Before the first step, their length, sha256 and ids are checked. During the run, they are watched for changes.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from common.errors import BadInput, check_all
from common.files import sha256
from common.launch import environment_nodes
from common.output import note, show
from common.text import readable_bytes
from tokens.format.header import TokenFile
from tokens.format.manifest import Content, read_contents, still_grows
from tokens.format.token_file import TokenStream, Version, version_of
from training.config.batch_plan import Plan, make_plan
from training.config.train_config import Run, TrainConfig
from training.data.locate_tokens import locate_tokens
from training.data.open_tokens import (
    PlannedTokens,
    TokenDirectory,
    TokenSet,
    check_objective,
    check_tokenizers,
    open_all,
)
from training.parallel.process_group import Ranks, together

if TYPE_CHECKING:
    from tokens.prepare.growing_tokens import GrowingTokens

HASHED_AT_ONCE = 4  # files
ANNOUNCED_BYTES = 2e9  # above this size, a line is printed, because reading the files takes more than a few seconds
TOKEN_POLL_SECONDS = 1.0  # pause between two checks of tokens that are being written


def verify_tokens(run: Run, tokens: PlannedTokens, ranks: Ranks) -> TokenSet:
    """Verify the token files, and return the token set with their contents.

    Files are read once per machine. If a check fails, raises BadInput on every rank.
    """
    train, plan, vocabulary_size = run.train, tokens.plan, run.model.vocab_size
    directories = _with_enough_validation(tokens.token_set, train, plan, ranks)
    size = sum(file.path.stat().st_size for directory in directories for file in _files(directory))
    if size > ANNOUNCED_BYTES:
        show(f"checking token files: {readable_bytes(size)}", once=True)
    checked = []
    for directory in directories:
        read = functools.partial(read_contents, _files(directory), directory.manifest)
        # The other ranks wait in gloo, which does not keep a CPU core busy.
        on_machines = together(ranks, read, only=ranks.node.rank == 0, group=ranks.download)
        checked.append(attrs.evolve(directory, contents=agreed_contents(directory.path, on_machines)))

    def check_ids() -> None:
        for directory, stream, first, count in _ranges_to_read(checked, plan, train):
            if max(directory.contents[file.path.name].max_id for file in stream.files) < vocabulary_size:
                continue
            share = -(-count // ranks.node.size)  # the ranks of a machine divide the range among themselves
            begin = first + ranks.node.rank * share
            stream.check_ids(begin, max(0, min(share, first + count - begin)), vocabulary_size)

    def check_unchanged() -> None:  # versions were recorded before the contents were read
        for stream in [stream for directory in checked if directory.growing is None for stream in directory.streams]:
            for path, version in stream.versions.items():
                if version_of(path) != version:
                    raise _modified(path)

    together(ranks, check_ids)
    together(ranks, check_unchanged)
    return TokenSet(tuple(checked))


def tokens_at_hand(train: TrainConfig, token_files: Path | None) -> TokenSet | None:
    """Return the run's opened tokens; None if some have yet to be downloaded or prepared.

    Raises BadInput if a dataset is missing or damaged.
    """
    locations = locate_tokens(train, token_files)
    if any(location.remote or still_grows(location.directory) for location in locations):
        return None
    return open_all([(location, None) for location in locations], train)


def check_tokens(run: Run, token_files: Path | None, world_size: int) -> PlannedTokens | None:
    """Return the run's tokens with its plan; None if they are not on this machine, or if the job has several nodes.

    Raises BadInput with all problems that the tokens have.
    """
    token_set = tokens_at_hand(run.train, token_files) if environment_nodes() == 1 else None
    if token_set is None:
        return None
    context, first = run.model.context_length, [directory.validation for directory in token_set.validated[:1]]
    plan, *_ = check_all(
        lambda: make_plan(run.train, context, world_size, token_set.lengths),
        lambda: check_tokenizers(token_set, run.model.vocab_size, run.train.file.with_name("model.json")),
        lambda: check_objective(run, token_set.streams),
        *(functools.partial(_check_length, stream, run.train, context) for stream in first if stream is not None),
    )
    return PlannedTokens(token_set, plan)


def agreed_contents(directory: Path, on_machines: list[dict[str, Content]]) -> dict[str, Content]:
    """Return the contents of the token files. Raises BadInput if they are not the same on all machines."""
    for number, contents in enumerate(on_machines):
        for name, content in on_machines[0].items():
            if contents.get(name) != content:
                raise BadInput(
                    f"{directory / name}: machine {number + 1} of {len(on_machines)} has no file of this name, or "
                    "a file that differs from the first machine's; copy the same token files to all machines"
                )
    return on_machines[0]


def _files(directory: TokenDirectory) -> list[TokenFile]:
    return [] if directory.growing is not None else [file for stream in directory.streams for file in stream.files]


def _ranges_to_read(
    directories: list[TokenDirectory], plan: Plan, train: TrainConfig
) -> Iterator[tuple[TokenDirectory, TokenStream, int, int]]:
    """Yield (directory, stream, first token, number of tokens) for each range that the run reads."""
    for directory, source in zip(directories, plan.sources, strict=True):
        if source.windows is None:  # still being prepared, so ids are checked when they are read
            continue
        # A shuffled run may read any window.
        windows = source.windows if train.data.shuffle else min(source.windows, source.sequences)
        if source.sequences > 0:
            yield directory, directory.train, train.data.start_train_token, windows * plan.layout.context_length + 1
        if directory.validation is not None:
            yield directory, directory.validation, train.validation.start_val_token, _validation_tokens(plan)


def _validation_tokens(plan: Plan) -> int:
    return plan.validation_sequences * plan.layout.context_length + 1


def _with_enough_validation(token_set: TokenSet, train: TrainConfig, plan: Plan, ranks: Ranks) -> list[TokenDirectory]:
    """Return the directories, without the validation streams that are too short.

    Waits for a validation stream that is still being prepared. Raises BadInput if the first validation stream is too
    short.
    """
    needed_tokens, directories = train.validation.start_val_token + _validation_tokens(plan), []
    for directory in token_set.directories:
        growing, stream, usable = directory.growing, directory.validation, directory
        if stream is not None and growing is not None:
            wait = functools.partial(_wait_for_validation, growing, needed_tokens)
            together(ranks, wait, only=ranks.node.rank == 0, group=ranks.download)  # the other ranks wait in gloo
            growing.refresh()
        elif stream is not None and stream.length < needed_tokens:
            if directory is token_set.validated[0]:
                _check_length(stream, train, plan.layout.context_length)
            usable = attrs.evolve(directory, validation=None)
            problem = f"got {stream.length:,} tokens, wanted {needed_tokens:,}"
            show(note(f"{stream.files[0].path}: not used for validation: {problem}"), once=True)
        elif stream is None and train.validation.validation_interval is not None:
            show(note(_why_not_validated(directory, token_set)), once=True)
        directories.append(usable)
        if growing is None:
            _note_missing_shards(usable)
    return directories


def _note_missing_shards(directory: TokenDirectory) -> None:
    """Print a note if token files were written by another program and the first files are missing.

    Files of prepare_data.py do not need this note, because their names include the number of shards.
    """
    foreign = [stream for stream in directory.streams if stream.files[0].path.suffix != ".safetensors"]
    if not foreign:
        return
    from tokens.format.foreign_files import describe_missing_first

    for stream in foreign:
        show(*describe_missing_first(directory.path, stream.files), once=True)


def _why_not_validated(directory: TokenDirectory, token_set: TokenSet) -> str:
    """Return a line that explains why a dataset of a mixture is not used for validation, and which dataset is used."""
    growing, first = directory.growing, token_set.validated[0].dataset
    if growing is not None and "validation" in growing.splits:
        reason = f"it is still being prepared, and so is an earlier dataset; validation uses {first}"
    else:
        reason = (
            "it has no validation tokens; prepare some with --validation-fraction. "
            f"The loss on {first} determines the best checkpoint"
        )
    return f"{directory.path}: not used for validation: {reason}"


def _check_length(stream: TokenStream, train: TrainConfig, context_length: int) -> None:
    begin, sequences = train.validation.start_val_token, train.validation.validation_sequences
    needed_tokens = begin + sequences * context_length + 1
    if stream.length < needed_tokens:
        raise BadInput(
            f"{stream.files[0].path}: got {stream.length:,} tokens, wanted at least {needed_tokens:,} = {begin:,} + "
            f"{sequences:,} sequences x {context_length:,} + 1; hold out more with --validation-fraction, or lower "
            f"validation_sequences in {train.file}"
        )


def _wait_for_validation(growing: "GrowingTokens", needed_tokens: int) -> None:
    """Wait until a validation stream has enough tokens. Raises BadInput if the finished stream has fewer."""
    growing.refresh()
    is_announced = False
    while (available := growing.committed("validation")) < needed_tokens:
        if growing.finished:
            raise BadInput(
                f"{growing.directory}: got {available:,} validation tokens, wanted at least {needed_tokens:,}; "
                "hold out more with --validation-fraction, or lower validation_sequences in train.json"
            )
        if not is_announced:
            is_announced = True
            progress = f"{growing.directory}: {growing.progress()}"
            show(f"waiting for {needed_tokens:,} validation tokens; {progress}", once=True)
        if (problem := growing.abandoned()) is not None:
            raise BadInput(problem)
        time.sleep(TOKEN_POLL_SECONDS)
        growing.refresh()


class TokenWatch:
    """Checks whether this rank's token files have changed during the run.

    Files are hashed in threads, so that no rank waits for another rank's disk.
    """

    def __init__(self, streams: Sequence[TokenStream], digests: dict[Path, str]):
        """`digests` are the sha256 hashes of the files before the first step."""
        self._versions = {path: version for stream in streams for path, version in stream.versions.items()}
        self._digests = digests
        self._threads = ThreadPoolExecutor(HASHED_AT_ONCE, thread_name_prefix="token hash")
        # Files that are being hashed, with their version before hashing started
        self._hashing: dict[Path, tuple[Version, Future[str]]] = {}

    def check(self, *, wait: bool) -> list[Path]:
        """Return the files that were touched without a change to their content.

        With `wait`, wait for all hashes. Raises BadInput, on this rank only, if the content of a file has changed.
        """
        touched = []
        for path, before in self._versions.items():
            now = version_of(path)
            if now in (before, None):  # None: deleted, but still readable, because it is open
                continue
            if before is None or now[0] != before[0] or path not in self._digests:
                raise _modified(path)
            if path not in self._hashing:
                self._hashing[path] = now, self._threads.submit(sha256, path)
            version, digest = self._hashing[path]
            if not wait and not digest.done():
                continue
            del self._hashing[path]
            with suppress(OSError):  # if the file cannot be read, reading its tokens will raise the error
                if digest.result() != self._digests[path]:
                    raise _modified(path)
                self._versions[path] = version
                touched.append(path)
        return touched


def _modified(path: Path) -> BadInput:
    return BadInput(
        f"{path}: was modified while the run was reading it; restore it, then rerun the same command, "
        "which continues from the last checkpoint",
        alone=True,
    )
