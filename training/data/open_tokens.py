"""The token files of a run: found or downloaded, and opened."""

import re
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput
from common.files import is_folder
from tokens.batches.micro_batches import Reading, TokenSource
from tokens.batches.sampling import WindowOrder
from tokens.format.manifest import Content, Manifest, is_of, open_listed, read_manifest
from tokens.format.token_file import TokenStream, open_split
from tokens.hub.download import download_dataset
from tokens.prepare.growing_tokens import GrowingTokens
from tokens.tokenizer.tokenizer import RANKS_FILE
from training.config.batch_plan import Plan
from training.config.train_config import Run
from training.data.follow import growing_directories
from training.parallel.process_group import Ranks, together

ROOT = Path(__file__).parents[2]
DOWNLOADS = ROOT / "token_files"
ENDLESS = 1 << 62  # windows of a stream whose end is not known yet


@attrs.frozen(kw_only=True)
class TokenDirectory:
    """The token files of one dataset, opened; checked as soon as `contents` are there."""

    dataset: str  # as train.json names it, or the directory of --token-files
    path: Path
    manifest: Manifest | None
    train: TokenStream
    validation: TokenStream | None  # where the run validates on it
    contents: dict[str, Content] = attrs.field(factory=dict)  # by file name, from training/data/verify_tokens.py
    growing: GrowingTokens | None = None  # of files that are still being written

    @property
    def streams(self) -> list[TokenStream]:
        """What the run reads."""
        return [self.train] if self.validation is None else [self.train, self.validation]

    @property
    def tokenizer(self) -> dict[str, Any] | None:
        """What is known of the tokenizer."""
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
    def tokenizer(self) -> tuple[Path, dict[str, Any]] | None:
        """A directory whose manifest tells of the tokenizer, and what it tells; all that tell, tell the same."""
        for directory in self.directories:
            if directory.tokenizer is not None:
                return directory.path, directory.tokenizer
        return None


@attrs.frozen
class TokenPlace:
    """Where a dataset's token files are; `hub_dataset` names what has to be there, downloaded if need be."""

    dataset: str
    directory: Path
    hub_dataset: str | None


def locate_tokens(run: Run, given: Path | None) -> list[TokenPlace]:
    """Return the place of each dataset: `given`, a local directory, or that of a hub dataset under token_files/."""
    if given is None:
        return [_locate(run, part.dataset) for part in run.train.data.parts]
    if not isinstance(run.train.data.dataset, str):
        raise BadInput(
            f"--token-files {given}: takes the place of one dataset, but {run.directory / 'train.json'} has a list; "
            "name the directories there"
        )
    return [TokenPlace(str(given), given, None)]


def lengths_at_hand(run: Run, given: Path | None) -> dict[str, int | None]:
    """Return the tokens of each dataset's train stream, None where its files are not here, by dataset.

    Raises BadInput for files that are damaged; or not here, when there is no plan without them.
    """
    if run.train.data.min_train_tokens is None:
        try:
            return {place.dataset: open_split(place.directory, "train").length for place in locate_tokens(run, given)}
        except BadInput as error:
            raise BadInput(f"{error}; or set min_train_tokens: null, all tokens, needs them to count steps") from error
    if given is not None:
        [place] = locate_tokens(run, given)
        return {place.dataset: open_split(given, "train").length}
    lengths: dict[str, int | None] = {}
    for part in run.train.data.parts:
        here = [path for path in _candidates(part.dataset) if _has_split(path, "train", None)]
        lengths[part.dataset] = open_split(here[0], "train").length if here else None
    return lengths


def open_tokens(run: Run, given: Path | None, ranks: Ranks, *, follow: bool) -> TokenSet:
    """Return the run's tokens, downloaded first if need be; with `follow` also those that are still being written.

    Call it on every rank. Raises BadInput on every rank.
    """
    places = locate_tokens(run, given)
    for place in places:
        _download(place, ranks)
    growing = growing_directories(run, [place.directory for place in places], ranks, follow=follow)
    token_sets: list[TokenSet] = []
    together(ranks, lambda: token_sets.append(_open_all(run, places, growing)))
    return token_sets[0]


def make_reading(run: Run, plan: Plan, token_set: TokenSet) -> Reading:
    """Return what the ranks of a run read."""
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
                max_epochs=run.train.data.max_epochs,
                growing=directory.growing,
            )
        )
    return Reading(
        sources=tuple(sources), mixture=plan.mixture, layout=plan.layout, vocabulary_size=run.model.vocab_size
    )


def _candidates(dataset: str) -> list[Path]:
    """Return where a dataset's token files may lie, the first choice first."""
    return [Path(dataset), ROOT / dataset, DOWNLOADS / dataset]


def _locate(run: Run, dataset: str) -> TokenPlace:
    *local, download = _candidates(dataset)
    for directory in local:
        if is_folder(directory):
            return TokenPlace(dataset, directory, None)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", dataset) and not dataset.startswith("token_files/"):
        return TokenPlace(dataset, download, dataset)
    raise BadInput(
        f"{run.directory / 'train.json'}: dataset: {dataset:.200} is no directory here; prepare it with "
        f"prepare_data.py SOURCE... --output {dataset:.200}"
        + (", or pass --token-files DIR" if isinstance(run.train.data.dataset, str) else "")
    )


def _download(place: TokenPlace, ranks: Ranks) -> None:
    """Bring a dataset of the hub here, once per machine, while its other ranks wait on gloo."""
    dataset = place.hub_dataset
    if dataset is not None:
        together(
            ranks,
            lambda: download_dataset(dataset, place.directory),
            only=ranks.local_rank == 0,
            group=ranks.download,
        )


def _open_all(run: Run, places: list[TokenPlace], growing: list[GrowingTokens | None]) -> TokenSet:
    manifests = [read_manifest(place.directory) for place in places]
    validated = None
    if run.train.validation.validation_interval is not None:
        validated = _validated(run, places, manifests, growing)
    directories = []
    for place, manifest, grows in zip(places, manifests, growing, strict=True):
        if grows is not None:
            directories.append(
                TokenDirectory(
                    dataset=place.dataset,
                    path=place.directory,
                    manifest=None,
                    train=grows.stream("train"),
                    validation=grows.stream("validation") if place is validated else None,
                    growing=grows,
                )
            )
            continue
        train = open_listed(place.directory, "train", manifest)
        validation = open_listed(place.directory, "validation", manifest) if place is validated else None
        directories.append(
            TokenDirectory(
                dataset=place.dataset, path=place.directory, manifest=manifest, train=train, validation=validation
            )
        )
    token_set = TokenSet(tuple(directories))
    _check_tokenizers(run, token_set)
    return token_set


def _validated(
    run: Run, places: list[TokenPlace], manifests: list[Manifest | None], growing: list[GrowingTokens | None]
) -> TokenPlace:
    """Return the dataset to validate on: the first one of a list that has a validation split, or will have one."""
    for place, manifest, grows in zip(places, manifests, growing, strict=True):
        if grows is not None:
            if "validation" in grows.splits:
                return place
        elif isinstance(run.train.data.dataset, str) or _has_split(place.directory, "validation", manifest):
            return place
    raise BadInput(
        f"{run.directory / 'train.json'}: dataset: none of {', '.join(place.dataset for place in places)} holds "
        "validation.safetensors; prepare one with --validation-fraction, or set validation_interval to null"
    )


def _has_split(directory: Path, split: str, manifest: Manifest | None) -> bool:
    names = [path.name for path in directory.glob(f"{split}*.safetensors")]
    names += [] if manifest is None else manifest.files
    return any(is_of(name, split) for name in names)


def _check_tokenizers(run: Run, token_set: TokenSet) -> None:
    """Raise BadInput for tokens of another tokenizer than the other datasets', or than the model's vocabulary."""
    if token_set.tokenizer is None:
        return
    first, tokenizer = token_set.tokenizer
    if tokenizer["vocabulary_size"] > run.model.vocab_size:
        raise BadInput(
            f"{run.directory / 'model.json'}: vocab_size: got {run.model.vocab_size}, wanted at least "
            f"{tokenizer['vocabulary_size']}, the vocabulary of tokenizer {tokenizer['name']} in {first}"
        )
    for directory in token_set.directories:
        other = directory.tokenizer
        if other is None:
            continue
        if _identity(directory.path, other) != _identity(first, tokenizer):
            raise BadInput(
                f"{directory.path}: made with tokenizer {other['name']}, {other['vocabulary_size']:,} ids, but {first} "
                f"with {tokenizer['name']}, {tokenizer['vocabulary_size']:,} ids, or with other ranks of that name; "
                "prepare all datasets of a run with one tokenizer"
            )


def _identity(directory: Path, tokenizer: dict[str, Any]) -> tuple[Any, ...]:
    ranks = (directory / RANKS_FILE).read_bytes() if tokenizer["ranks_file"] else None
    return tokenizer["name"], tokenizer["vocabulary_size"], tokenizer["end_of_text_id"], ranks
