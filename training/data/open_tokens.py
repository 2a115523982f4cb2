"""The token set of a run: its opened token files, and the training data that all ranks read from them."""

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
from training.data.locate_tokens import TokenLocation, download, locate_tokens, train_tokens_needed
from training.parallel.process_group import Ranks, from_coordinator, together

if TYPE_CHECKING:
    from tokens.prepare.growing_tokens import GrowingTokens


@attrs.frozen(kw_only=True)
class TokenDirectory:
    """The opened token files of one dataset. If `contents` is not empty, the files have been verified."""

    dataset: str  # the name in train.json, or the directory given with --token-files
    path: Path
    manifest: Manifest | None
    train: TokenStream
    validation: TokenStream | None  # None if the run does not validate on this dataset
    # File name -> content, set by training/data/verify_tokens.py
    contents: dict[str, Content] = attrs.field(factory=dict)
    growing: "GrowingTokens | None" = None  # set while the files are still being prepared

    @property
    def streams(self) -> list[TokenStream]:
        return [self.train] if self.validation is None else [self.train, self.validation]

    @property
    def tokenizer(self) -> TokenizerRecord | None:
        """The tokenizer's entry in the manifest, or in the plan of growing tokens."""
        record = self.growing or self.manifest
        return None if record is None else record.tokenizer


@attrs.frozen
class TokenSet:
    directories: tuple[TokenDirectory, ...]  # in the order of train.json

    @property
    def streams(self) -> list[TokenStream]:
        return [stream for directory in self.directories for stream in directory.streams]

    @property
    def validated(self) -> list[TokenDirectory]:
        """The directories on which the run validates. The loss on the first one decides which checkpoint is best."""
        return [directory for directory in self.directories if directory.validation is not None]

    @property
    def digests(self) -> dict[Path, str]:
        """The sha256 of each file that was read before the first step."""
        return {
            directory.path / name: content.sha256
            for directory in self.directories
            for name, content in directory.contents.items()
        }

    @property
    def lengths(self) -> dict[str, int | None]:
        """Dataset -> number of tokens in its train stream, or None while the stream is still being prepared."""
        return {
            directory.dataset: directory.train.length if directory.growing is None else None
            for directory in self.directories
        }

    @property
    def tokenizer(self) -> tuple[Path, TokenizerRecord] | None:
        """The directory that has the tokenizer with the largest vocabulary, and the record of that tokenizer.

        The tokenizers of a run differ only in special tokens at the end.
        """
        records = [
            (directory.path, directory.tokenizer) for directory in self.directories if directory.tokenizer is not None
        ]
        path, largest = max(records, key=lambda record: record[1].vocabulary_size, default=(None, None))
        if path is None or largest is None:
            return None
        templates = [tokenizer.template for _, tokenizer in records if tokenizer.template is not None]
        return path, attrs.evolve(largest, template=next(iter(templates), None))


@attrs.frozen
class PlannedTokens:
    """A run's opened tokens, and the plan that follows from their lengths."""

    token_set: TokenSet
    plan: Plan


def open_tokens(run: Run, token_files: Path | None, ranks: Ranks, *, follow: bool) -> PlannedTokens:
    """Open the run's tokens, and make its plan. Missing tokens are downloaded. Call this on every rank.

    `token_files` is the directory given with --token-files. With `follow`, tokens that are still being prepared are
    accepted. Raises BadInput on every rank if the tokens are missing, damaged, or do not fit the run.
    """
    context, world_size = run.model.context_length, ranks.data_parallel.size * ranks.tensor.size
    locations = locate_tokens(run.train, token_files)
    if any(location.remote for location in locations):
        needed_tokens = train_tokens_needed(run.train, context, world_size)
        for location in locations:
            download(location, needed_tokens.get(location.dataset), ranks)
    growing = _growing([location.directory for location in locations], ranks, follow=follow)
    unfinished = next((tokens.directory for tokens in growing if tokens is not None), None)
    if unfinished is not None and run.train.data.shuffle and run.train.data.era_tokens is None:
        raise BadInput(
            run.train.located(
                Problem(
                    key="era_tokens",
                    found="null",
                    expected="a number, such as 100000000",
                    cause=f"{unfinished} is still being prepared, and a shuffle of the complete stream would have to "
                    "wait until it is finished",
                )
            )
        )
    token_sets: list[TokenSet] = []

    def open_and_check() -> None:
        token_sets.append(open_all(list(zip(locations, growing, strict=True)), run.train))
        check_tokenizers(token_sets[0], run.model.vocab_size, run.directory / "model.json")
        check_objective(run, token_sets[0].streams)

    together(ranks, open_and_check)
    return PlannedTokens(token_sets[0], make_plan(run.train, context, world_size, token_sets[0].lengths))


def _growing(directories: list[Path], ranks: Ranks, *, follow: bool) -> "list[GrowingTokens | None]":
    """Return, for each directory, its growing tokens if it is still being prepared, or None if it is finished.

    Rank 0 decides which directories are still being prepared. Raises BadInput if there is such a directory and `follow`
    is False.
    """

    def find_growing() -> list[bool]:
        is_growing = [still_grows(path) for path in directories]
        for path in [path for path, grows in zip(directories, is_growing, strict=True) if grows]:
            if not follow:
                raise BadInput(f"{path}: still being prepared; wait until it is finished, or pass --follow")
            follow_tokens(path)
        return is_growing

    def follow_tokens(path: Path) -> "GrowingTokens":
        from tokens.prepare.growing_tokens import GrowingTokens  # imported here because finished tokens do not need it

        return GrowingTokens(path)

    is_growing = from_coordinator(ranks, find_growing)
    return [follow_tokens(path) if grows else None for path, grows in zip(directories, is_growing, strict=True)]


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
    """Open all train streams and, if the run validates, the validation streams.

    The validation stream of growing tokens is opened only if no earlier dataset has a validation stream.
    """
    directories: list[TokenDirectory] = []
    run_validates = train.validation.validation_interval is not None
    for location, growing in locations:
        path = location.directory
        manifest = read_manifest(path)
        open_stream: Callable[[str], TokenStream] = partial(open_listed, path, manifest=manifest)
        if growing is None:
            is_expected = isinstance(train.data.dataset, str)  # a single dataset must have validation tokens
            validates = run_validates and (is_expected or has_split(path, "validation", manifest))
        else:
            is_first = all(directory.validation is None for directory in directories)
            validates, open_stream = run_validates and is_first and "validation" in growing.splits, growing.stream
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
    if run_validates and all(directory.validation is None for directory in directories):
        datasets = ", ".join(directory.dataset for directory in directories)
        raise BadInput(
            train.located(
                Problem(
                    key="dataset",
                    text=f"dataset: none of {datasets} has validation tokens",
                    advice="prepare some with --validation-fraction, or set validation_interval to null",
                )
            )
        )
    return TokenSet(tuple(directories))


def check_tokenizers(token_set: TokenSet, vocabulary_size: int, model_json: Path) -> None:
    """Raise BadInput if the model's vocabulary is too small, or if datasets have different tokenizers.

    Only the special tokens at the end of a tokenizer's vocabulary are allowed to differ.
    """
    if token_set.tokenizer is None:
        return
    first, tokenizer = token_set.tokenizer
    if tokenizer.vocabulary_size > vocabulary_size:
        raise BadInput(
            f"{model_json}: vocab_size: got {vocabulary_size}, wanted at least {tokenizer.vocabulary_size}, the "
            f"vocabulary of tokenizer {tokenizer.name} in {first}"
        )
    for directory in token_set.directories:
        record = directory.tokenizer
        if record is not None and (
            _ranks(directory.path, record) != _ranks(first, tokenizer) or not tokenizer.extends(record)
        ):
            raise BadInput(
                f"{directory.path}: was prepared with tokenizer {record.name} ({record.vocabulary_size:,} ids), but "
                f"{first} was prepared with {tokenizer.name} ({tokenizer.vocabulary_size:,} ids) or with another "
                "tokenizer of that name; prepare all datasets of a run with the same tokenizer"
            )
        if record is not None and record.template not in (None, tokenizer.template):
            raise BadInput(
                f"{directory.path}: its conversations have a different template than those of other datasets; prepare "
                "all datasets with the same --template"
            )


def check_objective(run: Run, streams: Iterable[TokenStream | None]) -> None:
    """Raise BadInput if the objective, the context length or a start token does not fit the streams.

    A stream is None if it is not on this machine.
    """
    train, context, streams = run.train, run.model.context_length, list(streams)
    objective, problems = train.data.objective, []
    rows = {
        stream.files[0].path.parent: stream.context_length for stream in streams if stream and stream.context_length
    }
    if objective == "text" and rows:
        problems.append(
            f'{train.file}: objective: got "text", wanted "answers", because {next(iter(rows))} has conversations'
        )
    problems += [
        f"{train.file.with_name('model.json')}: context_length: got {context}, wanted {length}, the length of the rows "
        f"of conversations in {directory}; change it, or prepare the conversations with another --context-length"
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
    if objective == "answers" and streams and not rows and None not in streams:
        directories = dict.fromkeys(str(stream.files[0].path.parent) for stream in streams if stream and stream.files)
        problems.append(
            f'{train.file}: objective: got "answers", wanted "text": no conversations in {", ".join(directories)}; '
            "prepare_data.py writes them with --template"
        )
    if problems:
        raise BadInput(*problems)


def _ranks(directory: Path, tokenizer: TokenizerRecord) -> bytes | str:
    """Return what identifies a tokenizer's merge ranks: the content of its ranks file or, without a file, its name."""
    return (directory / RANKS_FILE).read_bytes() if tokenizer.ranks_file else tokenizer.name
