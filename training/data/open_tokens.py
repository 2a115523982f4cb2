"""Token set of a run: its token files, opened, and the training data that all ranks read from them."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from common.errors import BadInput, Problem
from tokens.batches.micro_batches import ENDLESS, Reading, TokenSource
from tokens.batches.sampling import WindowOrder
from tokens.format.manifest import (
    RANKS_FILE,
    Content,
    Manifest,
    TokenizerRecord,
    has_split,
    open_listed,
    read_manifest,
    still_grows,
)
from tokens.format.token_file import TokenStream
from training.config.batch_plan import Plan, make_plan
from training.config.train_config import Run, TrainConfig
from training.data.locate_tokens import TokenLocation, download, locate_tokens, train_tokens_wanted
from training.parallel.process_group import Ranks, from_coordinator, together

if TYPE_CHECKING:
    from tokens.prepare.growing_tokens import GrowingTokens


@attrs.frozen(kw_only=True)
class TokenDirectory:
    """Opened token files of one dataset; verified once `contents` are there."""

    dataset: str  # as train.json names it, or the directory of --token-files
    path: Path
    manifest: Manifest | None
    train: TokenStream
    validation: TokenStream | None  # where the run validates on it
    contents: dict[str, Content] = attrs.field(factory=dict)  # by file name, from training/data/verify_tokens.py
    growing: "GrowingTokens | None" = None  # while the files are still being prepared

    @property
    def streams(self) -> list[TokenStream]:
        return [self.train] if self.validation is None else [self.train, self.validation]

    @property
    def tokenizer(self) -> TokenizerRecord | None:
        """The tokenizer's entry in the manifest, or in the plan of growing tokens."""
        recorded = self.growing or self.manifest
        return None if recorded is None else recorded.tokenizer


@attrs.frozen
class TokenSet:
    directories: tuple[TokenDirectory, ...]  # in the order of train.json

    @property
    def streams(self) -> list[TokenStream]:
        return [stream for directory in self.directories for stream in directory.streams]

    @property
    def validated(self) -> list[TokenDirectory]:
        """The directories that the run validates on; the first one's loss decides which checkpoint is best."""
        return [directory for directory in self.directories if directory.validation is not None]

    @property
    def digests(self) -> dict[Path, str]:
        """The sha256 of each file that was read before the first step."""
        return {each.path / name: one.sha256 for each in self.directories for name, one in each.contents.items()}

    @property
    def lengths(self) -> dict[str, int | None]:
        """Tokens of each train stream, by dataset; None while it is being prepared."""
        return {each.dataset: each.train.length if each.growing is None else None for each in self.directories}

    @property
    def tokenizer(self) -> tuple[Path, TokenizerRecord] | None:
        """A directory that records its tokenizer, and the entry; of several the one with most special tokens."""
        recorded = [(each.path, each.tokenizer) for each in self.directories if each.tokenizer is not None]
        path, largest = max(recorded, key=lambda each: each[1].vocabulary_size, default=(None, None))
        if path is None or largest is None:
            return None
        templates = [tokenizer.template for _, tokenizer in recorded if tokenizer.template is not None]
        return path, attrs.evolve(largest, template=next(iter(templates), None))


@attrs.frozen
class PlannedTokens:
    """A run's tokens, opened, and the plan that follows from their lengths."""

    token_set: TokenSet
    plan: Plan


def open_tokens(run: Run, given: Path | None, ranks: Ranks, *, follow: bool) -> PlannedTokens:
    """Open the run's tokens and plan; tokens that are missing are downloaded.

    With `follow`, tokens that are still being prepared are opened as well. Call it on every rank. Raises BadInput on
    every rank.
    """
    context, world_size = run.model.context_length, ranks.data_parallel.size * ranks.tensor.size
    locations = locate_tokens(run.train, given)
    if any(location.remote for location in locations):
        needed_tokens = train_tokens_wanted(run.train, context, world_size)
        for location in locations:
            download(location, needed_tokens.get(location.dataset), ranks)
    growing = _growing([location.directory for location in locations], ranks, follow=follow)
    unfinished = next((grows.directory for grows in growing if grows is not None), None)
    if unfinished is not None and run.train.data.shuffle and run.train.data.era_tokens is None:
        raise BadInput(
            run.train.located(
                Problem(
                    key="era_tokens",
                    found="null",
                    expected="a number, such as 100000000",
                    cause=f"{unfinished} is still being prepared, and a permutation of the whole stream would have to "
                    "wait for its end",
                )
            )
        )
    token_sets: list[TokenSet] = []

    def open_them() -> None:
        token_sets.append(open_all(list(zip(locations, growing, strict=True)), run.train))
        check_tokenizers(token_sets[0], run.model.vocab_size, run.directory / "model.json")
        check_objective(run, token_sets[0].streams)

    together(ranks, open_them)
    return PlannedTokens(token_sets[0], make_plan(run.train, context, world_size, token_sets[0].lengths))


def _growing(directories: list[Path], ranks: Ranks, *, follow: bool) -> "list[GrowingTokens | None]":
    """Return directories in preparation, by rank 0's look, None for the others. Raises BadInput without --follow."""

    def look() -> list[bool]:
        grow = [still_grows(path) for path in directories]
        for path in [path for path, grows in zip(directories, grow, strict=True) if grows]:
            if not follow:
                raise BadInput(f"{path}: still being prepared; wait for it, or pass --follow")
            follow_tokens(path)
        return grow

    def follow_tokens(path: Path) -> "GrowingTokens":
        from tokens.prepare.growing_tokens import GrowingTokens  # finished tokens need none of it

        return GrowingTokens(path)

    grow = from_coordinator(ranks, look)
    return [follow_tokens(path) if grows else None for path, grows in zip(directories, grow, strict=True)]


def make_reading(train: TrainConfig, plan: Plan, token_set: TokenSet, vocabulary_size: int) -> Reading:
    era = None if train.data.era_tokens is None else train.data.era_tokens // plan.layout.context_length
    sources = []
    for number, (directory, source) in enumerate(zip(token_set.directories, plan.sources, strict=True)):
        count = ENDLESS if source.windows is None else source.windows
        order = WindowOrder(count=count, shuffle=train.data.shuffle, seed=train.random_seed, era=era, source=number)
        sources.append(
            TokenSource(
                stream=directory.train,
                start_token=train.data.start_train_token,
                order=order,
                growing=directory.growing,
                max_epochs=train.data.max_epochs,
            )
        )
    return Reading(
        sources=tuple(sources),
        mixture=plan.mixture,
        layout=plan.layout,
        vocabulary_size=vocabulary_size,
        weighted=train.data.objective == "answers",
    )


def open_all(locations: "list[tuple[TokenLocation, GrowingTokens | None]]", train: TrainConfig) -> TokenSet:
    """Open all train streams, and to validate on all validation streams; of growing tokens the first one alone."""
    directories: list[TokenDirectory] = []
    wanted = train.validation.validation_interval is not None
    for location, growing in locations:
        path = location.directory
        manifest = read_manifest(path)
        open_stream: Callable[[str], TokenStream] = partial(open_listed, path, manifest=manifest)
        if growing is None:
            validates = wanted and (isinstance(train.data.dataset, str) or has_split(path, "validation", manifest))
        else:
            is_first = all(each.validation is None for each in directories)
            validates, open_stream = wanted and is_first and "validation" in growing.splits, growing.stream
        directories.append(
            TokenDirectory(
                dataset=location.dataset,
                path=path,
                manifest=manifest,
                train=open_stream("train"),
                validation=open_stream("validation") if validates else None,
                growing=growing,
            )
        )
    if wanted and all(each.validation is None for each in directories):
        raise BadInput(
            train.located(
                Problem(
                    key="dataset",
                    text=f"dataset: none of {', '.join(each.dataset for each in directories)} holds validation tokens",
                    advice="prepare some with --validation-fraction, or set validation_interval to null",
                )
            )
        )
    return TokenSet(tuple(directories))


def check_tokenizers(token_set: TokenSet, vocabulary_size: int, model_json: Path) -> None:
    """Raise BadInput for different tokenizers, but for special tokens at the end, and for too small a vocabulary."""
    if token_set.tokenizer is None:
        return
    first, tokenizer = token_set.tokenizer
    if tokenizer.vocabulary_size > vocabulary_size:
        raise BadInput(
            f"{model_json}: vocab_size: got {vocabulary_size}, wanted at least {tokenizer.vocabulary_size}, the "
            f"vocabulary of tokenizer {tokenizer.name} in {first}"
        )
    for directory in token_set.directories:
        other = directory.tokenizer
        if other is not None and (
            _ranks(directory.path, other) != _ranks(first, tokenizer) or not tokenizer.extends(other)
        ):
            raise BadInput(
                f"{directory.path}: made with tokenizer {other.name}, {other.vocabulary_size:,} ids, but {first} "
                f"with {tokenizer.name}, {tokenizer.vocabulary_size:,} ids, or with another of that name; "
                "prepare all datasets of a run with one tokenizer"
            )
        if other is not None and other.template not in (None, tokenizer.template):
            raise BadInput(
                f"{directory.path}: its conversations have another template than those of other datasets; prepare all "
                "with one --template"
            )


def check_objective(run: Run, streams: Iterable[TokenStream | None]) -> None:
    """Raise BadInput where the objective, the context or a start does not fit the streams; None: not at hand."""
    train, context, streams = run.train, run.model.context_length, list(streams)
    wanted, problems = train.data.objective, []
    rows = {each.files[0].path.parent: each.context_length for each in streams if each and each.context_length}
    if wanted == "text" and rows:
        problems.append(f'{train.file}: objective: got "text", wanted "answers": {next(iter(rows))} has conversations')
    problems += [
        f"{train.file.with_name('model.json')}: context_length: got {context}, wanted {length}, that of the rows of "
        f"conversations in {directory}; set it to that, or prepare them with another --context-length"
        for directory, length in rows.items()
        if length != context
    ]
    starts = {"start_train_token": train.data.start_train_token, "start_val_token": train.validation.start_val_token}
    problems += [
        f"{train.file}: {key}: got {start}, wanted a multiple of {length}, where a row of conversations begins"
        for length in list(rows.values())[:1]
        for key, start in starts.items()
        if start % length
    ]
    if wanted == "answers" and streams and not rows and None not in streams:
        directories = dict.fromkeys(str(stream.files[0].path.parent) for stream in streams if stream and stream.files)
        problems.append(
            f'{train.file}: objective: got "answers", wanted "text": no conversations in {", ".join(directories)}; '
            "prepare_data.py writes them with --template"
        )
    if problems:
        raise BadInput(*problems)


def _ranks(directory: Path, tokenizer: TokenizerRecord) -> bytes | str:
    """Return the ranks of a tokenizer, or its name, which tells them."""
    return (directory / RANKS_FILE).read_bytes() if tokenizer.ranks_file else tokenizer.name
