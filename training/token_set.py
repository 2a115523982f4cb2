"""The token files of a run: found or downloaded, opened, and checked before the first step."""

import re
from pathlib import Path
from typing import Any

import attrs

from errors import BadInput
from tokens.hub import download_dataset
from tokens.manifest import Content, Manifest, open_listed, read_contents, read_manifest
from tokens.token_file import TokenStream
from training.config import Run
from training.plan import Plan
from training.ranks import Ranks, together

ROOT = Path(__file__).parents[1]
DOWNLOADS = ROOT / "token_files"
ANNOUNCED_BYTES = 2e9  # what takes longer to read than a few seconds is said


@attrs.frozen
class TokenSet:
    """The token files of a run, opened; checked as soon as `contents` are there."""

    train: TokenStream
    validation: TokenStream | None
    manifest: Manifest | None
    directory: Path
    contents: dict[str, Content] = attrs.field(factory=dict)  # by file name, from check_tokens

    @property
    def tokenizer(self) -> dict[str, Any] | None:
        """The manifest's entry about the tokenizer, where there is one."""
        return None if self.manifest is None else self.manifest.tokenizer

    @property
    def streams(self) -> list[TokenStream]:
        """What the run reads."""
        return [self.train] if self.validation is None else [self.train, self.validation]


@attrs.frozen
class TokenPlace:
    """Where a run's token files are; `hub_dataset` names what has to be there, downloaded if need be."""

    directory: Path
    hub_dataset: str | None


def locate_tokens(run: Run, given: Path | None) -> TokenPlace:
    """Return the place of a run's tokens: `given`, a local directory, or that of a hub dataset under token_files/."""
    if given is not None:
        return TokenPlace(given, None)
    dataset = run.train.dataset
    for directory in (Path(dataset), ROOT / dataset):
        if directory.is_dir():
            return TokenPlace(directory, None)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", dataset) and not dataset.startswith("token_files/"):
        return TokenPlace(DOWNLOADS / dataset, dataset)
    raise BadInput(
        f"{run.directory / 'train.json'}: dataset: {dataset} is no directory here; prepare it with "
        f"prepare_data.py SOURCE... --output {dataset}, or pass --token-files DIR"
    )


def open_tokens(run: Run, given: Path | None, ranks: Ranks) -> TokenSet:
    """Return the run's tokens, downloaded first if need be. Call it on every rank. Raises BadInput on every rank."""
    place = locate_tokens(run, given)
    directory, dataset = place.directory, place.hub_dataset
    if dataset is not None:  # once per machine, while its other ranks wait on gloo
        together(ranks, lambda: download_dataset(dataset, directory), only=ranks.local_rank == 0, group=ranks.download)
    validating = run.train.validation_interval is not None

    def open_all() -> TokenSet:
        manifest = read_manifest(directory)
        train = open_listed(directory, "train", manifest)
        validation = open_listed(directory, "validation", manifest) if validating else None
        token_set = TokenSet(train, validation, manifest, directory)
        tokenizer = token_set.tokenizer
        if tokenizer is not None and tokenizer["vocabulary_size"] > run.model.vocab_size:
            raise BadInput(
                f"{run.directory / 'model.json'}: vocab_size: got {run.model.vocab_size}, wanted at least "
                f"{tokenizer['vocabulary_size']}, the vocabulary of tokenizer {tokenizer['name']} in {directory}"
            )
        return token_set

    token_sets: list[TokenSet] = []
    together(ranks, lambda: token_sets.append(open_all()))
    return token_sets[0]


def check_tokens(run: Run, plan: Plan, token_set: TokenSet, ranks: Ranks) -> TokenSet:
    """Return the token set with what its files hold, all of them read once per machine. Call it on every rank.

    Raises BadInput on every rank for too few tokens, a damaged file, or an id beyond the vocabulary.
    """
    ranges = _ranges_to_read(run, plan, token_set)
    files = [file for stream in token_set.streams for file in stream.files]
    size = sum(file.path.stat().st_size for file in files)
    if ranks.coordinates and size > ANNOUNCED_BYTES:
        print(f"checking token files: {size / 1e9:.1f} GB", flush=True)
    on_machines = together(  # its other ranks wait on gloo, and leave it the processor
        ranks,
        lambda: read_contents(files, token_set.manifest),
        only=ranks.local_rank == 0,
        group=ranks.download,
    )
    contents = agreed_contents(token_set.directory, on_machines)

    def check_ids() -> None:
        for stream, begin, count in ranges:
            if max(contents[file.path.name].max_id for file in stream.files) < run.model.vocab_size:
                continue
            share = -(-count // ranks.local_world_size)  # each machine looks at its copy once
            first = begin + ranks.local_rank * share
            stream.check_ids(first, max(0, min(share, begin + count - first)), run.model.vocab_size)

    together(ranks, check_ids)
    return attrs.evolve(token_set, contents=contents)


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


def _ranges_to_read(run: Run, plan: Plan, token_set: TokenSet) -> list[tuple[TokenStream, int, int]]:
    """Return (stream, first token, count) of what the run reads. Raises BadInput for a stream that is too short."""
    length, context = token_set.train.length, plan.layout.context_length
    wanted = plan.start_token + plan.train_tokens + 1
    if length < wanted:
        raise BadInput(
            f"{token_set.train.files[0].path}: got {length:,} tokens, wanted at least {wanted:,} = "
            f"{plan.start_token:,} + {plan.steps:,} steps x {plan.tokens_per_step:,} + 1; prepare more, or lower "
            f"min_train_tokens in {run.directory / 'train.json'}"
        )
    ranges = [(token_set.train, plan.start_token, plan.train_tokens + 1)]
    if run.train.shuffle:  # any window of the stream may come
        ranges = [(token_set.train, plan.start_token, length - plan.start_token)]
    if token_set.validation is not None:
        count = plan.validation_sequences * context + 1
        begin = run.train.start_val_token
        if token_set.validation.length < begin + count:
            raise BadInput(
                f"{token_set.validation.files[0].path}: got {token_set.validation.length:,} tokens, wanted at least "
                f"{begin + count:,} = {begin:,} + {plan.validation_sequences:,} sequences x {context:,} + 1; hold out "
                f"more with --validation-fraction, or lower validation_sequences in {run.directory / 'train.json'}"
            )
        ranges.append((token_set.validation, begin, count))
    return ranges
