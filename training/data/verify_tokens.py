"""Verification of a run's token files before the first step: length, sha256, ids, the same on every machine."""

import functools
from collections.abc import Iterator
from pathlib import Path

import attrs

from common.errors import BadInput
from tokens.format.contents import read_contents
from tokens.format.header import TokenFile
from tokens.format.manifest import Content
from tokens.format.token_file import TokenStream
from training.config.batch_plan import Plan
from training.config.train_config import Run
from training.data.follow_tokens import wait_for_validation
from training.data.open_tokens import TokenDirectory, TokenSet
from training.parallel.process_group import Ranks, together

ANNOUNCED_BYTES = 2e9  # reading more takes more than a few seconds


def verify_tokens(run: Run, plan: Plan, token_set: TokenSet, ranks: Ranks) -> TokenSet:
    """Return the token set with the contents of its files, read once per machine. Call it on every rank.

    Raises BadInput on every rank for too few tokens, a damaged file, or an id beyond the vocabulary.
    """
    _wait_for_validation(run, plan, token_set, ranks)
    _check_validation_length(run, plan, token_set)
    size = sum(file.path.stat().st_size for directory in token_set.directories for file in _files(directory))
    if ranks.coordinates and size > ANNOUNCED_BYTES:
        print(f"checking token files: {size / 1e9:.1f} GB", flush=True)
    checked = []
    for directory in token_set.directories:
        read = functools.partial(read_contents, _files(directory), directory.manifest)
        # the other ranks wait on gloo, which leaves this one the processor
        on_machines = together(ranks, read, only=ranks.local_rank == 0, group=ranks.download)
        checked.append(attrs.evolve(directory, contents=agreed_contents(directory.path, on_machines)))

    def check_ids() -> None:
        for directory, stream, begin, count in _ranges_to_read(run, plan, checked):
            if max(directory.contents[file.path.name].max_id for file in stream.files) < run.model.vocab_size:
                continue
            share = -(-count // ranks.local_world_size)  # each machine looks at its copy once
            first = begin + ranks.local_rank * share
            stream.check_ids(first, max(0, min(share, begin + count - first)), run.model.vocab_size)

    together(ranks, check_ids)
    return TokenSet(tuple(checked))


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
    """Return the files to be read through before the first step."""
    return [] if directory.growing is not None else [file for stream in directory.streams for file in stream.files]


def _ranges_to_read(
    run: Run, plan: Plan, directories: list[TokenDirectory]
) -> Iterator[tuple[TokenDirectory, TokenStream, int, int]]:
    """Yield (directory, stream, first token, count) of each range that the run reads."""
    for directory, source in zip(directories, plan.sources, strict=True):
        if source.windows is None:  # still being prepared: ids are checked when they are read
            continue
        # Shuffled, any window may come.
        windows = source.windows if run.train.data.shuffle else min(source.windows, source.sequences)
        if source.sequences > 0:
            yield directory, directory.train, plan.start_token, windows * plan.layout.context_length + 1
        if directory.validation is not None:
            count = plan.validation_sequences * plan.layout.context_length + 1
            yield directory, directory.validation, run.train.validation.start_val_token, count


def _wait_for_validation(run: Run, plan: Plan, token_set: TokenSet, ranks: Ranks) -> None:
    """Wait for the tokens to validate on, once per machine, while its other ranks wait on gloo."""
    directory = token_set.validation
    if directory is None or directory.growing is None:
        return
    growing = directory.growing
    wanted = run.train.validation.start_val_token + plan.validation_sequences * plan.layout.context_length + 1
    wait = functools.partial(wait_for_validation, growing, wanted, say=ranks.coordinates)
    together(ranks, wait, only=ranks.local_rank == 0, group=ranks.download)
    growing.refresh()


def _check_validation_length(run: Run, plan: Plan, token_set: TokenSet) -> None:
    directory = token_set.validation
    if directory is None or directory.validation is None or directory.growing is not None:
        return
    context, begin, stream = plan.layout.context_length, run.train.validation.start_val_token, directory.validation
    wanted = begin + plan.validation_sequences * context + 1
    if stream.length < wanted:
        raise BadInput(
            f"{stream.files[0].path}: got {stream.length:,} tokens, wanted at least {wanted:,} = {begin:,} + "
            f"{plan.validation_sequences:,} sequences x {context:,} + 1; hold out more with --validation-fraction, or "
            f"lower validation_sequences in {run.directory / 'train.json'}"
        )
