"""The directories of a run's token files: local folders, or downloads from the hub or a bucket to `token_files/`."""

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
    dataset: str  # the name in train.json, or the directory given with --token-files
    directory: Path
    remote: bool = False  # whether the dataset can be downloaded to the directory


def locate_tokens(train: TrainConfig, token_files: Path | None, *, can_override: bool = True) -> list[TokenLocation]:
    """Return the directory of each dataset, or the directory to which it will be downloaded.

    Arguments:
        train: the configuration, which names the datasets
        token_files: the directory given with --token-files, which replaces a single dataset; None without this option
        can_override: whether an error may recommend --token-files

    Raises BadInput if a dataset does not exist.
    """
    if token_files is None:
        return [_locate(part.dataset, train, can_override) for part in train.data.parts]
    if not isinstance(train.data.dataset, str):
        raise BadInput(
            f"--token-files {token_files}: can replace only a single dataset, but {train.file} has a list; write the "
            "directories into that list"
        )
    return [TokenLocation(str(token_files), token_files)]


def lengths_at_hand(train: TrainConfig) -> dict[str, int | None]:
    """Map each dataset to the number of tokens in its train stream.

    The number is None if any part of the stream is not on this machine. Raises BadInput as `streams_at_hand` does.
    """
    return lengths_of(streams_at_hand(train, None))


def lengths_of(streams: Mapping[str, TokenStream | None]) -> dict[str, int | None]:
    return {name: None if stream is None else stream.length for name, stream in streams.items()}


def streams_at_hand(train: TrainConfig, token_files: Path | None) -> dict[str, TokenStream | None]:
    """Map each dataset to its train stream, or to None if any part of that stream is not on this machine.

    Raises BadInput for a dataset that does not exist, but only if the number of steps depends on the streams.
    """
    if token_files is not None or train.data.min_train_tokens is None:  # the streams determine the number of steps
        streams: dict[str, TokenStream | None] = {}
        for location in locate_tokens(train, token_files):
            directory = location.directory
            absent = location.remote and (not has_split(directory) or _is_incomplete(directory))
            streams[location.dataset] = None if absent else open_split(directory, "train")
        return streams
    paths = {part.dataset: [path for path in _candidates(part.dataset) if has_split(path)] for part in train.data.parts}
    complete = {name: [path for path in local[:1] if not _is_incomplete(path)] for name, local in paths.items()}
    return {name: open_split(local[0], "train") if local else None for name, local in complete.items()}


def train_tokens_needed(train: TrainConfig, context_length: int, world_size: int) -> dict[str, int | None]:
    """Return how many tokens the run reads from the beginning of each train stream; None means all tokens.

    Raises BadInput as make_plan does.
    """
    if train.data.min_train_tokens is None or train.data.shuffle:
        return dict.fromkeys(part.dataset for part in train.data.parts)
    plan = make_plan(train, context_length, world_size)
    first = train.data.start_train_token
    return {source.dataset: first + source.sequences * context_length + 1 for source in plan.sources}


def download(location: TokenLocation, train_tokens: int | None, ranks: Ranks) -> None:
    """Download a dataset if it is remote. One rank per machine downloads it, while the other ranks wait in gloo.

    From the hub, at least `train_tokens` tokens of the train stream are downloaded; None means all of them.
    """
    if location.remote:
        from tokens.hub.download import download_dataset

        fetch = functools.partial(download_dataset, location.dataset, location.directory, train_tokens)
        together(ranks, fetch, only=ranks.node.rank == 0, group=ranks.download)


def _is_incomplete(directory: Path) -> bool:
    """Return whether only the first shards of a dataset have been downloaded to a directory."""
    from tokens.hub.download import tokens_downloaded

    return tokens_downloaded(directory) is not None


def _candidates(dataset: str) -> list[Path]:
    if is_bucket(dataset):
        return [DOWNLOADS / dataset.replace("://", "/")]
    if dataset.startswith(HUB):
        return [DOWNLOADS / dataset.removeprefix(HUB)]
    return [Path(dataset), ROOT / dataset, DOWNLOADS / dataset]


def _locate(dataset: str, train: TrainConfig, can_override: bool) -> TokenLocation:
    *local, download = _candidates(dataset)
    for directory in local:
        if is_folder(directory):
            _note_local(dataset, directory)
            return TokenLocation(dataset, directory)
    if is_bucket(dataset):
        return TokenLocation(dataset, download, remote=True)
    from common.hub_client import DATASET, hub_name, nearest_folder  # imported here because most runs do not need it

    if dataset.startswith(DOWNLOADS.name + "/") or not re.fullmatch(rf"({HUB})?[\w-][\w.-]*/[\w.-]+", dataset):
        near = nearest_folder(dataset, TOKEN_FOLDERS, has_split)
        suggestion = "" if near is None else f"did you mean {near}? If not, "
        option = ", or pass --token-files DIR" if can_override and isinstance(train.data.dataset, str) else ""
        prepare = f"prepare it with prepare_data.py SOURCE... --output {dataset:.200}"
        problem = f"dataset: {dataset:.200} is not a directory here"
        raise BadInput(train.located(Problem(key="dataset", text=problem, advice=f"{suggestion}{prepare}{option}")))
    with refusing(train.located(Problem(key="dataset")), kinds=(BadInput,)):
        hub_name(dataset, DATASET, TOKEN_FOLDERS, has_split)
    return TokenLocation(dataset, download, remote=True)


def _note_local(dataset: str, directory: Path) -> None:
    """Print a note if the name of a local folder could also be the name of a dataset on the hub.

    No note is printed for a folder that prepare_data.py has made.
    """
    is_ours = any((directory / name).is_file() for name in (MANIFEST, PLAN))
    if "/" in dataset and not is_ours:
        from common.hub_client import DATASET, note_local

        note_local(dataset, DATASET)
