"""Download of token files from a bucket: once per machine, resumable, only where the disk has room."""

import json
from fnmatch import fnmatch
from pathlib import Path

from common.bucket import Bucket
from common.errors import BadInput
from common.files import free_disk, replace_file, writing
from tokens.format.foreign_names import SUFFIXES
from tokens.hub.download import PATTERNS, RECEIPT

PARTIAL = ".partial-"  # begins the name of a file that is being downloaded


def download_tokens(url: str, directory: Path) -> None:
    """Download the token files directly under a prefix, unless the directory has them.

    Raises BadInput where the bucket does not answer or has no token files, or the disk is too small.
    """
    if (directory / RECEIPT).is_file():
        return
    bucket = Bucket(url)
    patterns = [*PATTERNS, *(f"*.{suffix}" for suffix in SUFFIXES)]
    sizes = {
        name: size
        for name, size in bucket.sizes().items()
        if "/" not in name and any(fnmatch(name, pattern) for pattern in patterns)
    }
    missing = {name: size for name, size in sizes.items() if not (directory / name).is_file()}
    _check(url, directory, sizes, sum(missing.values()))
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for name, size in missing.items():
        partial = directory / f"{PARTIAL}{name}"
        with writing(partial):
            with partial.open("wb") as file:
                for _, piece in bucket.pieces(name, size):
                    file.write(piece)
            partial.replace(directory / name)
    with writing(directory / RECEIPT):
        replace_file(directory / RECEIPT, json.dumps({"dataset": url}) + "\n")


def _check(url: str, directory: Path, sizes: dict[str, int], missing_bytes: int) -> None:
    if not any(name.endswith((".safetensors", *SUFFIXES)) for name in sizes):
        raise BadInput(f"dataset {url}: got no token files there, wanted train.safetensors, or shards (.bin, .npy)")
    existing, free_bytes = free_disk(directory)
    if missing_bytes > free_bytes:
        raise BadInput(
            f"dataset {url}: got {free_bytes / 1e9:.1f} GB free at {existing}, wanted {missing_bytes / 1e9:.1f} GB; "
            "free some, or pass --token-files DIR on a larger disk"
        )
