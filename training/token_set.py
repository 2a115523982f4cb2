"""The token files of a run: found or downloaded, opened, and checked before the first step."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from errors import BadInput
from tokens.batches import WindowOrder
from tokens.growing import GrowingTokens
from tokens.hub import download_dataset
from tokens.manifest import Content, Manifest, open_listed, read_contents, read_manifest
from tokens.reading import Reading, Source
from tokens.token_file import TokenFile, TokenStream, open_split
from tokens.tokenizer import RANKS_FILE
from training.config import Run
from training.follow import growing_directories, wait_for_validation
from training.plan import Plan
from training.ranks import Ranks, together

ROOT = Path(__file__).parents[1]
DOWNLOADS = ROOT / "token_files"
ENDLESS = 1 << 62  # windows of a stream whose end is not known yet
ANNOUNCED_BYTES = 2e9  # what takes longer to read than a few seconds is said


@attrs.frozen(kw_only=True)
class TokenDirectory:
    """The token files of one dataset, opened; checked as soon as `contents` are there."""

    dataset: str  # as train.json names it, or the directory of --token-files
    path: Path
    manifest: Manifest | None
    train: TokenStream
    validation: TokenStream | None  # where the run validates on it
    contents: dict[str, Content] = attrs.field(factory=dict)  # by file name, from check_tokens
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
        return [_locate(run, part.dataset) for part in run.train.parts]
    if not isinstance(run.train.dataset, str):
        raise BadInput(
            f"--token-files {given}: takes the place of one dataset, but {run.directory / 'train.json'} has a list; "
            "name the directories there"
        )
    return [TokenPlace(str(given), given, None)]


def lengths_at_hand(run: Run, given: Path | None) -> dict[str, int | None]:
    """Return the tokens of each dataset's train stream, None where its files are not here, by dataset.

    Raises BadInput for files that are damaged; or not here, when there is no plan without them.
    """
    if run.train.min_train_tokens is None:
        return {place.dataset: open_split(place.directory, "train").length for place in locate_tokens(run, given)}
    if given is not None:
        [place] = locate_tokens(run, given)
        return {place.dataset: open_split(given, "train").length}
    lengths: dict[str, int | None] = {}
    for part in run.train.parts:
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


def check_tokens(run: Run, plan: Plan, token_set: TokenSet, ranks: Ranks) -> TokenSet:
    """Return the token set with what its files hold, all of them read once per machine. Call it on every rank.

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
        # its other ranks wait on gloo, and leave it the processor
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


def make_reading(run: Run, plan: Plan, token_set: TokenSet) -> Reading:
    """Return what the ranks of a run read."""
    sources = []
    era = None if run.train.era_tokens is None else run.train.era_tokens // plan.layout.context_length
    for number, (directory, source) in enumerate(zip(token_set.directories, plan.sources, strict=True)):
        count = ENDLESS if source.windows is None else source.windows
        seed, shuffle = run.train.random_seed, run.train.shuffle
        order = WindowOrder(count=count, shuffle=shuffle, seed=seed, era=era, source=number)
        sources.append(
            Source(
                stream=directory.train,
                start_token=plan.start_token,
                order=order,
                max_epochs=run.train.max_epochs,
                growing=directory.growing,
            )
        )
    return Reading(
        sources=tuple(sources), mixture=plan.mixture, layout=plan.layout, vocabulary_size=run.model.vocab_size
    )


def agreed_contents(directory: Path, on_machines: list[dict[str, Content]]) -> dict[str, Content]:
    """Return what every machine's token files hold. Raises BadInput when one machine's differ from the first one's."""
    for number, other in enumerate(on_machines):
        for name, content in on_machines[0].items():
            if other.get(name) != content:
                raise BadInput(
                    f"{directory / name}: machine {number + 1} of {len(on_machines)} has another file of this name, or "
                    "none, than the first; bring the same token files to all machines"
                )
    return on_machines[0]


def _candidates(dataset: str) -> list[Path]:
    """Return where a dataset's token files may lie, the first choice first."""
    return [Path(dataset), ROOT / dataset, DOWNLOADS / dataset]


def _locate(run: Run, dataset: str) -> TokenPlace:
    *local, download = _candidates(dataset)
    for directory in local:
        if directory.is_dir():
            return TokenPlace(dataset, directory, None)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", dataset) and not dataset.startswith("token_files/"):
        return TokenPlace(dataset, download, dataset)
    raise BadInput(
        f"{run.directory / 'train.json'}: dataset: {dataset} is no directory here; prepare it with "
        f"prepare_data.py SOURCE... --output {dataset}"
        + (", or pass --token-files DIR" if isinstance(run.train.dataset, str) else "")
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
    if run.train.validation_interval is not None:
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
        elif isinstance(run.train.dataset, str) or _has_split(place.directory, "validation", manifest):
            return place
    raise BadInput(
        f"{run.directory / 'train.json'}: dataset: none of {', '.join(place.dataset for place in places)} holds "
        "validation.safetensors; prepare one with --validation-fraction, or set validation_interval to null"
    )


def _has_split(directory: Path, split: str, manifest: Manifest | None) -> bool:
    names = [path.name for path in directory.glob(f"{split}*.safetensors")]
    names += [] if manifest is None else manifest.files
    return any(re.fullmatch(rf"{split}(-\d+-of-\d+)?\.safetensors", name) for name in names)


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


def _files(directory: TokenDirectory) -> list[TokenFile]:
    """Return the files to be read through before the first step."""
    return [] if directory.growing is not None else [file for stream in directory.streams for file in stream.files]


def _ranges_to_read(
    run: Run, plan: Plan, directories: list[TokenDirectory]
) -> Iterator[tuple[TokenDirectory, TokenStream, int, int]]:
    """Yield (directory, stream, first token, count) of what the run reads."""
    for directory, source in zip(directories, plan.sources, strict=True):
        if source.windows is None:  # still being written: ids are looked at when they are read
            continue
        # Shuffled, any window may come.
        windows = source.windows if run.train.shuffle else min(source.windows, source.sequences)
        if source.sequences > 0:
            yield directory, directory.train, plan.start_token, windows * plan.layout.context_length + 1
        if directory.validation is not None:
            count = plan.validation_sequences * plan.layout.context_length + 1
            yield directory, directory.validation, run.train.start_val_token, count


def _wait_for_validation(run: Run, plan: Plan, token_set: TokenSet, ranks: Ranks) -> None:
    """Wait until what the run validates on is there, once per machine, while its other ranks wait on gloo."""
    directory = token_set.validation
    if directory is None or directory.growing is None:
        return
    growing = directory.growing
    wanted = run.train.start_val_token + plan.validation_sequences * plan.layout.context_length + 1

    def wait() -> None:
        wait_for_validation(growing, wanted, lambda line: print(line, flush=True) if ranks.coordinates else None)

    together(ranks, wait, only=ranks.local_rank == 0, group=ranks.download)
    growing.refresh()


def _check_validation_length(run: Run, plan: Plan, token_set: TokenSet) -> None:
    directory = token_set.validation
    if directory is None or directory.validation is None or directory.growing is not None:
        return
    context, begin, stream = plan.layout.context_length, run.train.start_val_token, directory.validation
    wanted = begin + plan.validation_sequences * context + 1
    if stream.length < wanted:
        raise BadInput(
            f"{stream.files[0].path}: got {stream.length:,} tokens, wanted at least {wanted:,} = {begin:,} + "
            f"{plan.validation_sequences:,} sequences x {context:,} + 1; hold out more with --validation-fraction, or "
            f"lower validation_sequences in {run.directory / 'train.json'}"
        )
