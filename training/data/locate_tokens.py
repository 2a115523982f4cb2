"""Directories of a run's token files: local, or downloaded from the hub to `token_files/`."""

import functools
import re
from pathlib import Path

import attrs

from common.errors import BadInput
from common.files import is_folder
from tokens.format.manifest import Manifest, is_of
from tokens.format.token_file import open_split
from tokens.hub.download import download_dataset
from training.config.train_config import Run
from training.parallel.process_group import Ranks, together

ROOT = Path(__file__).parents[2]
DOWNLOADS = ROOT / "token_files"


@attrs.frozen
class TokenLocation:
    """Directory of a dataset's token files."""

    dataset: str  # as train.json names it, or the directory of --token-files
    directory: Path
    hub_dataset: str | None  # to be downloaded there, unless it has been


def locate_tokens(run: Run, given: Path | None) -> list[TokenLocation]:
    """Return where each dataset lies: in `given`, a local directory, or for a hub dataset under token_files/."""
    if given is None:
        return [_locate(run, part.dataset) for part in run.train.data.parts]
    if not isinstance(run.train.data.dataset, str):
        raise BadInput(
            f"--token-files {given}: takes the place of one dataset, but {run.directory / 'train.json'} has a list; "
            "name the directories there"
        )
    return [TokenLocation(str(given), given, None)]


def lengths_at_hand(run: Run, given: Path | None) -> dict[str, int | None]:
    """Return the tokens of each dataset's train stream, None where its files are not here, by dataset.

    Raises BadInput for damaged files, and for missing ones where the number of steps depends on them.
    """
    if run.train.data.min_train_tokens is None:
        try:
            return {
                location.dataset: open_split(location.directory, "train").length
                for location in locate_tokens(run, given)
            }
        except BadInput as error:
            raise BadInput(f"{error}; or set min_train_tokens: null, all tokens, needs them to count steps") from error
    if given is not None:
        [location] = locate_tokens(run, given)
        return {location.dataset: open_split(given, "train").length}
    lengths: dict[str, int | None] = {}
    for part in run.train.data.parts:
        here = [path for path in _candidates(part.dataset) if has_split(path, "train")]
        lengths[part.dataset] = open_split(here[0], "train").length if here else None
    return lengths


def download(location: TokenLocation, ranks: Ranks) -> None:
    """Download a dataset of the hub, once per machine, while its other ranks wait on gloo."""
    if location.hub_dataset is not None:
        fetch = functools.partial(download_dataset, location.hub_dataset, location.directory)
        together(ranks, fetch, only=ranks.local_rank == 0, group=ranks.download)


def has_split(directory: Path, split: str, manifest: Manifest | None = None) -> bool:
    """Return whether a directory holds, or its manifest lists, files of a split."""
    names = [path.name for path in directory.glob(f"{split}*.safetensors")]
    names += [] if manifest is None else manifest.files
    return any(is_of(name, split) for name in names)


def _candidates(dataset: str) -> list[Path]:
    """Return the directories to look in, the first choice first."""
    return [Path(dataset), ROOT / dataset, DOWNLOADS / dataset]


def _locate(run: Run, dataset: str) -> TokenLocation:
    *local, download = _candidates(dataset)
    for directory in local:
        if is_folder(directory):
            return TokenLocation(dataset, directory, None)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", dataset) and not dataset.startswith("token_files/"):
        return TokenLocation(dataset, download, dataset)
    raise BadInput(
        f"{run.directory / 'train.json'}: dataset: {dataset:.200} is no directory here; prepare it with "
        f"prepare_data.py SOURCE... --output {dataset:.200}"
        + (", or pass --token-files DIR" if isinstance(run.train.data.dataset, str) else "")
    )
