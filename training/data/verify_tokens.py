"""Verification of a run's token files: before the first step, length, sha256 and ids; then a watch for changes."""

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
ANNOUNCED_BYTES = 2e9  # reading more takes more than a few seconds
TOKEN_POLL_SECONDS = 1.0  # between two looks at tokens that are being written


def verify_tokens(run: Run, tokens: PlannedTokens, ranks: Ranks) -> TokenSet:
    """Return the set with its files' contents, read once per machine. Raises BadInput, on every rank."""
    train, plan, vocabulary_size = run.train, tokens.plan, run.model.vocab_size
    directories = _with_enough_validation(tokens.token_set, train, plan, ranks)
    size = sum(file.path.stat().st_size for directory in directories for file in _files(directory))
    if size > ANNOUNCED_BYTES:
        show(f"checking token files: {readable_bytes(size)}", once=True)
    checked = []
    for directory in directories:
        read = functools.partial(read_contents, _files(directory), directory.manifest)
        # the other ranks wait on gloo, which leaves this one the processor
        on_machines = together(ranks, read, only=ranks.node.rank == 0, group=ranks.download)
        checked.append(attrs.evolve(directory, contents=agreed_contents(directory.path, on_machines)))

    def check_ids() -> None:
        for directory, stream, first, count in _ranges_to_read(checked, plan, train):
            if max(directory.contents[file.path.name].max_id for file in stream.files) < vocabulary_size:
                continue
            share = -(-count // ranks.node.size)  # each machine looks at its copy once
            own = first + ranks.node.rank * share
            stream.check_ids(own, max(0, min(share, first + count - own)), vocabulary_size)

    def check_unchanged() -> None:  # since the streams were opened, before what is verified here was read
        for stream in [stream for directory in checked if directory.growing is None for stream in directory.streams]:
            for path, version in stream.versions.items():
                if version_of(path) != version:
                    raise _written(path)

    together(ranks, check_ids)
    together(ranks, check_unchanged)
    return TokenSet(tuple(checked))


def tokens_at_hand(train: TrainConfig, given: Path | None) -> TokenSet | None:
    """Return the run's tokens, opened; None where some are yet to be downloaded or prepared. Raises BadInput."""
    locations = locate_tokens(train, given)
    if any(location.remote or still_grows(location.directory) for location in locations):
        return None
    return open_all([(location, None) for location in locations], train)


def check_tokens(run: Run, given: Path | None, world_size: int) -> PlannedTokens | None:
    """Return the run's tokens with its plan, if the tokens are at hand and one node alone reads them.

    Raises BadInput with all of their problems.
    """
    token_set = tokens_at_hand(run.train, given) if environment_nodes() == 1 else None
    if token_set is None:
        return None
    context, first = run.model.context_length, [each.validation for each in token_set.validated[:1]]
    plan, *_ = check_all(
        lambda: make_plan(run.train, context, world_size, token_set.lengths),
        lambda: check_tokenizers(token_set, run.model.vocab_size, run.train.file.with_name("model.json")),
        lambda: check_objective(run, token_set.streams),
        *(functools.partial(_check_length, stream, run.train, context) for stream in first if stream is not None),
    )
    return PlannedTokens(token_set, plan)


def agreed_contents(directory: Path, on_machines: list[dict[str, Content]]) -> dict[str, Content]:
    """Return the contents of the token files. Raises BadInput when those of one machine differ from the first one's."""
    for number, other in enumerate(on_machines):
        for name, content in on_machines[0].items():
            if other.get(name) != content:
                raise BadInput(
                    f"{directory / name}: machine {number + 1} of {len(on_machines)} has another file of this name, or "
                    "none, than the first; bring the same token files to all machines"
                )
    return on_machines[0]


def _files(directory: TokenDirectory) -> list[TokenFile]:
    return [] if directory.growing is not None else [file for stream in directory.streams for file in stream.files]


def _ranges_to_read(
    directories: list[TokenDirectory], plan: Plan, train: TrainConfig
) -> Iterator[tuple[TokenDirectory, TokenStream, int, int]]:
    """Yield (directory, stream, first token, count) of each range that the run reads."""
    for directory, source in zip(directories, plan.sources, strict=True):
        if source.windows is None:  # still being prepared: ids are checked when they are read
            continue
        windows = source.windows if train.data.shuffle else min(source.windows, source.sequences)  # it may read any
        if source.sequences > 0:
            yield directory, directory.train, train.data.start_train_token, windows * plan.layout.context_length + 1
        if directory.validation is not None:
            yield directory, directory.validation, train.validation.start_val_token, _validation_tokens(plan)


def _validation_tokens(plan: Plan) -> int:
    return plan.validation_sequences * plan.layout.context_length + 1


def _with_enough_validation(token_set: TokenSet, train: TrainConfig, plan: Plan, ranks: Ranks) -> list[TokenDirectory]:
    """Return the directories, without further validation streams that are short. Raises BadInput for the first."""
    wanted, directories = train.validation.start_val_token + _validation_tokens(plan), []
    for directory in token_set.directories:
        growing, stream, kept = directory.growing, directory.validation, directory
        if stream is not None and growing is not None:
            wait = functools.partial(_wait_for_validation, growing, wanted)
            together(ranks, wait, only=ranks.node.rank == 0, group=ranks.download)  # the other ranks wait on gloo
            growing.refresh()
        elif stream is not None and stream.length < wanted:
            if directory is token_set.validated[0]:
                _check_length(stream, train, plan.layout.context_length)
            kept = attrs.evolve(directory, validation=None)
            got = f"got {stream.length:,} tokens, wanted {wanted:,}"
            show(note(f"{stream.files[0].path}: not validated on: {got}"), once=True)
        elif stream is None and train.validation.validation_interval is not None:
            show(note(_why_not_validated(directory, token_set)), once=True)
        directories.append(kept)
        if growing is None:
            _tell_missing_shards(kept)
    return directories


def _tell_missing_shards(directory: TokenDirectory) -> None:
    """Print a note about first shards that another program's token files lack; ours number theirs in their names."""
    foreign = [stream for stream in directory.streams if stream.files[0].path.suffix != ".safetensors"]
    if not foreign:
        return
    from tokens.format.foreign_files import describe_missing_first

    for stream in foreign:
        show(*describe_missing_first(directory.path, stream.files), once=True)


def _why_not_validated(directory: TokenDirectory, token_set: TokenSet) -> str:
    """Return a line on a dataset of a mixture without a validation stream, and on what decides instead."""
    growing, first = directory.growing, token_set.validated[0].dataset
    if growing is not None and "validation" in growing.splits:
        why = f"it is still being prepared, and so is an earlier dataset; validation is on {first}"
    else:
        why = (
            f"it has no validation tokens; prepare some with --validation-fraction. The best checkpoint goes by {first}"
        )
    return f"{directory.path}: not validated on: {why}"


def _check_length(stream: TokenStream, train: TrainConfig, context_length: int) -> None:
    begin, sequences = train.validation.start_val_token, train.validation.validation_sequences
    wanted = begin + sequences * context_length + 1
    if stream.length < wanted:
        raise BadInput(
            f"{stream.files[0].path}: got {stream.length:,} tokens, wanted at least {wanted:,} = {begin:,} + "
            f"{sequences:,} sequences x {context_length:,} + 1; hold out more with --validation-fraction, or lower "
            f"validation_sequences in {train.file}"
        )


def _wait_for_validation(growing: "GrowingTokens", wanted_tokens: int) -> None:
    """Wait until a validation stream has enough tokens. Raises BadInput when it ends with fewer."""
    growing.refresh()
    is_announced = False
    while (have := growing.committed("validation")) < wanted_tokens:
        if growing.finished:
            raise BadInput(
                f"{growing.directory}: its validation ended with {have:,} tokens, wanted at least {wanted_tokens:,}; "
                "hold out more with --validation-fraction, or lower validation_sequences in train.json"
            )
        if not is_announced:
            is_announced = True
            where = f"{growing.directory}: {growing.progress()}"
            show(f"waiting for {wanted_tokens:,} tokens to validate on; {where}", once=True)
        if (problem := growing.abandoned()) is not None:
            raise BadInput(problem)
        time.sleep(TOKEN_POLL_SECONDS)
        growing.refresh()


class TokenWatch:
    """Checks this rank's files and hashes in threads, so that no rank waits for the disk of another."""

    def __init__(self, streams: Sequence[TokenStream], digests: dict[Path, str]):
        """`digests`: the sha256 of each file before the first step."""
        self._versions = {path: version for stream in streams for path, version in stream.versions.items()}
        self._digests = digests
        self._threads = ThreadPoolExecutor(HASHED_AT_ONCE, thread_name_prefix="token hash")
        self._hashing: dict[Path, tuple[Version, Future[str]]] = {}  # with the version before it was read

    def check(self, *, wait: bool) -> list[Path]:
        """Return files that were touched; `wait`: for every hash. Raises BadInput, on this rank, for a changed one."""
        touched = []
        for path, before in self._versions.items():
            now = version_of(path)
            if now in (before, None):  # a deleted file that is open can be read
                continue
            if before is None or now[0] != before[0] or path not in self._digests:
                raise _written(path)
            if path not in self._hashing:
                self._hashing[path] = now, self._threads.submit(sha256, path)
            version, digest = self._hashing[path]
            if not wait and not digest.done():
                continue
            del self._hashing[path]
            with suppress(OSError):  # unreadable now: reading its tokens raises the error
                if digest.result() != self._digests[path]:
                    raise _written(path)
                self._versions[path] = version
                touched.append(path)
        return touched


def _written(path: Path) -> BadInput:
    return BadInput(
        f"{path}: was written while the run read it; put it back as it was, then rerun the same command, "
        "which continues from the last checkpoint",
        alone=True,
    )
