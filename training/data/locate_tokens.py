"""Directories of a run's token files: local, or downloaded from the hub or a bucket to `token_files/`."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from common.errors import BadInput, Problem, refusing
from common.files import HUB, is_bucket, is_folder
from tokens.format.manifest import MANIFEST, PLAN, has_split
from tokens.format.token_file import TokenStream, open_split
from training.config.batch_plan import make_plan
from training.config.train_config import TrainConfig
from training.parallel.process_group import Ranks, together

ROOT = Path(__file__).parents[2]
DOWNLOADS = ROOT / "token_files"
TOKEN_FOLDERS = (Path("token_files"), DOWNLOADS)  # where token directories usually are


@attrs.frozen
class TokenLocation:
    dataset: str  # as train.json names it, or the directory of --token-files
    directory: Path
    remote: bool = False  # to be downloaded there, unless it has been


def locate_tokens(train: TrainConfig, given: Path | None, *, can_give: bool = True) -> list[TokenLocation]:
    """Return where each dataset lies, or will once downloaded; all in `given`. Raises BadInput for one nowhere."""
    if given is None:
        return [_locate(part.dataset, train, can_give) for part in train.data.parts]
    if not isinstance(train.data.dataset, str):
        raise BadInput(
            f"--token-files {given}: takes the place of one dataset, but {train.file} has a list; name the "
            "directories there"
        )
    return [TokenLocation(str(given), given)]


def lengths_at_hand(train: TrainConfig) -> dict[str, int | None]:
    """Return the tokens of each dataset's train stream, None where not all are here, by dataset. Raises BadInput."""
    return lengths_of(streams_at_hand(train, None))


def lengths_of(streams: Mapping[str, TokenStream | None]) -> dict[str, int | None]:
    return {name: None if stream is None else stream.length for name, stream in streams.items()}


def streams_at_hand(train: TrainConfig, given: Path | None) -> dict[str, TokenStream | None]:
    """Return each dataset's train stream, None where not all of it is here, by dataset. Raises BadInput."""
    if given is not None or train.data.min_train_tokens is None:  # which counts the steps by them
        streams: dict[str, TokenStream | None] = {}
        for each in locate_tokens(train, given):
            absent = each.remote and (not has_split(each.directory) or _is_begun(each.directory))
            streams[each.dataset] = None if absent else open_split(each.directory, "train")
        return streams
    here = {part.dataset: [path for path in _candidates(part.dataset) if has_split(path)] for part in train.data.parts}
    whole = {name: [path for path in paths[:1] if not _is_begun(path)] for name, paths in here.items()}
    return {name: open_split(paths[0], "train") if paths else None for name, paths in whole.items()}


def train_tokens_wanted(train: TrainConfig, context_length: int, world_size: int) -> dict[str, int | None]:
    """Return the first tokens of each train stream that the run reads, None for all. Raises BadInput as make_plan."""
    if train.data.min_train_tokens is None or train.data.shuffle:
        return dict.fromkeys(part.dataset for part in train.data.parts)
    plan = make_plan(train, context_length, world_size)
    first = train.data.start_train_token
    return {source.dataset: first + source.sequences * context_length + 1 for source in plan.sources}


def download(location: TokenLocation, train_tokens: int | None, ranks: Ranks) -> None:
    """Download a dataset once per machine, while its other ranks wait on gloo; of the hub so many train tokens."""
    if location.remote:
        from tokens.hub.download import download_dataset

        fetch = functools.partial(download_dataset, location.dataset, location.directory, train_tokens)
        together(ranks, fetch, only=ranks.node.rank == 0, group=ranks.download)


def _is_begun(directory: Path) -> bool:
    """Tell whether only the first shards of a dataset have been downloaded there."""
    from tokens.hub.download import tokens_downloaded

    return tokens_downloaded(directory) is not None


def _candidates(dataset: str) -> list[Path]:
    if is_bucket(dataset):
        return [DOWNLOADS / dataset.replace("://", "/")]
    if dataset.startswith(HUB):
        return [DOWNLOADS / dataset.removeprefix(HUB)]
    return [Path(dataset), ROOT / dataset, DOWNLOADS / dataset]


def _locate(dataset: str, train: TrainConfig, can_give: bool) -> TokenLocation:
    *local, download = _candidates(dataset)
    for directory in local:
        if is_folder(directory):
            _note_local(dataset, directory)
            return TokenLocation(dataset, directory)
    if is_bucket(dataset):
        return TokenLocation(dataset, download, remote=True)
    from common.hub_client import DATASET, hub_name, nearest_folder  # only a name that is no folder here needs it

    if dataset.startswith(DOWNLOADS.name + "/") or not re.fullmatch(rf"({HUB})?[\w-][\w.-]*/[\w.-]+", dataset):
        near = nearest_folder(dataset, TOKEN_FOLDERS, has_split)
        meant = "" if near is None else f"did you mean {near}?; "
        given = ", or pass --token-files DIR" if can_give and isinstance(train.data.dataset, str) else ""
        prepare = f"prepare it with prepare_data.py SOURCE... --output {dataset:.200}"
        problem = f"dataset: {dataset:.200} is no directory here"
        raise BadInput(train.located(Problem(key="dataset", text=problem, advice=f"{meant}{prepare}{given}")))
    with refusing(train.located(Problem(key="dataset")), kinds=(BadInput,)):
        hub_name(dataset, DATASET, TOKEN_FOLDERS, has_split)
    return TokenLocation(dataset, download, remote=True)


def _note_local(dataset: str, directory: Path) -> None:
    """Say that a folder is read whose name may be a dataset's of the hub, unless prepare_data.py has made it."""
    is_ours = any((directory / name).is_file() for name in (MANIFEST, PLAN))
    if "/" in dataset and not is_ours:
        from common.hub_client import DATASET, note_local

        note_local(dataset, DATASET)
