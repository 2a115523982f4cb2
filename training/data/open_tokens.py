"""Token set of a run: its token files, opened, and the training data that all ranks read from them."""

from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput
from tokens.batches.micro_batches import ENDLESS, Reading, TokenSource
from tokens.batches.sampling import WindowOrder
from tokens.format.contents import open_listed
from tokens.format.manifest import Content, Manifest, TokenizerRecord, read_manifest
from tokens.format.token_file import TokenStream
from tokens.prepare.growing_tokens import GrowingTokens
from tokens.tokenizer.tokenizer import RANKS_FILE
from training.config.batch_plan import Plan
from training.config.train_config import Run
from training.data.follow_tokens import growing_directories
from training.data.locate_tokens import TokenLocation, download, has_split, locate_tokens
from training.parallel.process_group import Ranks, together


@attrs.frozen(kw_only=True)
class TokenDirectory:
    """Opened token files of one dataset; verified once `contents` are there."""

    dataset: str  # as train.json names it, or the directory of --token-files
    path: Path
    manifest: Manifest | None
    train: TokenStream
    validation: TokenStream | None  # where the run validates on it
    contents: dict[str, Content] = attrs.field(factory=dict)  # by file name, from training/data/verify_tokens.py
    growing: GrowingTokens | None = None  # while the files are still being prepared

    @property
    def streams(self) -> list[TokenStream]:
        """The streams that the run reads."""
        return [self.train] if self.validation is None else [self.train, self.validation]

    @property
    def tokenizer(self) -> TokenizerRecord | None:
        """The tokenizer's entry in the manifest, or in the plan of growing tokens."""
        if self.growing is not None:
            return self.growing.tokenizer
        return None if self.manifest is None else self.manifest.tokenizer


@attrs.frozen
class TokenSet:
    """The token files of a run."""

    directories: tuple[TokenDirectory, ...]  # in the order of train.json

    @property
    def validation(self) -> TokenDirectory | None:
        """The directory that the run validates on."""
        return next((directory for directory in self.directories if directory.validation is not None), None)

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
        """Tokens of each train stream, by dataset."""
        return {
            directory.dataset: None if directory.growing is not None else directory.train.length
            for directory in self.directories
        }

    @property
    def tokenizer(self) -> tuple[Path, TokenizerRecord] | None:
        """A directory that records its tokenizer, and the entry; all that record one have the same."""
        for directory in self.directories:
            if directory.tokenizer is not None:
                return directory.path, directory.tokenizer
        return None


def open_tokens(run: Run, given: Path | None, ranks: Ranks, *, follow: bool) -> TokenSet:
    """Return the run's tokens, downloaded where they are missing; with `follow` also those still being prepared.

    Call it on every rank. Raises BadInput on every rank.
    """
    locations = locate_tokens(run, given)
    for location in locations:
        download(location, ranks)
    growing = growing_directories([location.directory for location in locations], ranks, follow=follow)
    _check_order(run, growing)
    token_sets: list[TokenSet] = []
    together(ranks, lambda: token_sets.append(_open_all(run, locations, growing)))
    return token_sets[0]


def make_reading(run: Run, plan: Plan, token_set: TokenSet) -> Reading:
    """Return the training data of a run, as all ranks read it."""
    sources = []
    era = None if run.train.data.era_tokens is None else run.train.data.era_tokens // plan.layout.context_length
    for number, (directory, source) in enumerate(zip(token_set.directories, plan.sources, strict=True)):
        count = ENDLESS if source.windows is None else source.windows
        seed, shuffle = run.train.random_seed, run.train.data.shuffle
        order = WindowOrder(count=count, shuffle=shuffle, seed=seed, era=era, source=number)
        sources.append(
            TokenSource(
                stream=directory.train,
                start_token=plan.start_token,
                order=order,
                growing=directory.growing,
                max_epochs=run.train.data.max_epochs,
            )
        )
    return Reading(
        sources=tuple(sources), mixture=plan.mixture, layout=plan.layout, vocabulary_size=run.model.vocab_size
    )


def _check_order(run: Run, growing: list[GrowingTokens | None]) -> None:
    """Raise BadInput where the order of a growing stream's windows depends on its length."""
    path = next((grows.directory for grows in growing if grows is not None), None)
    if path is not None and run.train.data.shuffle and run.train.data.era_tokens is None:
        raise BadInput(
            f"{run.directory / 'train.json'}: era_tokens: got null, wanted a number, such as 100000000: {path} is "
            "still being prepared, and a permutation of the whole stream would have to wait for its end"
        )


def _open_all(run: Run, locations: list[TokenLocation], growing: list[GrowingTokens | None]) -> TokenSet:
    manifests = [read_manifest(location.directory) for location in locations]
    validated = None
    if run.train.validation.validation_interval is not None:
        validated = _validated(run, locations, manifests, growing)
    directories = []
    for location, manifest, grows in zip(locations, manifests, growing, strict=True):
        splits = ("train", "validation") if location is validated else ("train",)
        if grows is None:
            streams = [open_listed(location.directory, split, manifest) for split in splits]
        else:
            streams = [grows.stream(split) for split in splits]
        directories.append(
            TokenDirectory(
                dataset=location.dataset,
                path=location.directory,
                manifest=manifest,
                train=streams[0],
                validation=streams[1] if location is validated else None,
                growing=grows,
            )
        )
    token_set = TokenSet(tuple(directories))
    _check_tokenizers(run, token_set)
    return token_set


def _validated(
    run: Run,
    locations: list[TokenLocation],
    manifests: list[Manifest | None],
    growing: list[GrowingTokens | None],
) -> TokenLocation:
    """Return the dataset to validate on: the first one of a list that has a validation split, or will have one."""
    for location, manifest, grows in zip(locations, manifests, growing, strict=True):
        if grows is not None:
            if "validation" in grows.splits:
                return location
        elif isinstance(run.train.data.dataset, str) or has_split(location.directory, "validation", manifest):
            return location
    raise BadInput(
        f"{run.directory / 'train.json'}: dataset: none of {', '.join(each.dataset for each in locations)} holds "
        "validation.safetensors; prepare one with --validation-fraction, or set validation_interval to null"
    )


def _check_tokenizers(run: Run, token_set: TokenSet) -> None:
    """Raise BadInput where datasets have different tokenizers, or one beyond the model's vocabulary."""
    if token_set.tokenizer is None:
        return
    first, tokenizer = token_set.tokenizer
    if tokenizer.vocabulary_size > run.model.vocab_size:
        raise BadInput(
            f"{run.directory / 'model.json'}: vocab_size: got {run.model.vocab_size}, wanted at least "
            f"{tokenizer.vocabulary_size}, the vocabulary of tokenizer {tokenizer.name} in {first}"
        )
    for directory in token_set.directories:
        other = directory.tokenizer
        if other is None:
            continue
        if _identity(directory.path, other) != _identity(first, tokenizer):
            raise BadInput(
                f"{directory.path}: made with tokenizer {other.name}, {other.vocabulary_size:,} ids, but {first} "
                f"with {tokenizer.name}, {tokenizer.vocabulary_size:,} ids, or with other ranks of that name; "
                "prepare all datasets of a run with one tokenizer"
            )


def _identity(directory: Path, tokenizer: TokenizerRecord) -> tuple[Any, ...]:
    ranks = (directory / RANKS_FILE).read_bytes() if tokenizer.ranks_file else None
    return tokenizer.name, tokenizer.vocabulary_size, tokenizer.end_of_text_id, ranks
