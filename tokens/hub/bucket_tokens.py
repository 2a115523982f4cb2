"""Download of token files from a bucket: once per machine, resumable, only where the disk has room."""

import json
import os
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path

from common.bucket import Bucket, StoredObject
from common.errors import BadInput
from common.files import free_disk, locked_partial, replace_file, writing
from tokens.format.foreign_files import SUFFIXES
from tokens.hub.download import PATTERNS, RECEIPT

PARTIAL = ".partial-"  # begins the name of a file that is being downloaded
TOKENS = (".safetensors", *SUFFIXES)  # end the names of token files
CLOCK_TICK = 2.0  # seconds, of the coarsest file system


def download_tokens(url: str, directory: Path) -> None:
    """Download the token files directly under a prefix, unless the directory has them.

    Raises BadInput where the bucket does not answer or has no token files, or the disk is too small.
    """
    if (directory / RECEIPT).is_file():
        return
    bucket = Bucket(url)
    patterns = [*PATTERNS, *(f"*.{suffix}" for suffix in SUFFIXES)]
    objects = {
        name: found
        for name, found in bucket.objects().items()
        if "/" not in name and any(fnmatch(name, pattern) for pattern in patterns)
    }
    missing = {name: found for name, found in objects.items() if not _is_here(directory / name, found)}
    _check(url, directory, objects, sum(found.size_bytes for found in missing.values()))
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for name, found in missing.items():
        partial = directory / f"{PARTIAL}{name}"
        with writing(partial), locked_partial(partial) as file:
            if _is_here(directory / name, found):  # another process has downloaded it meanwhile
                partial.unlink()
                continue
            for _, piece in bucket.pieces(name, found.size_bytes, found.e_tag):
                file.write(piece)
            file.flush()
            os.utime(partial, (found.written_at, found.written_at))
            partial.replace(directory / name)
    with writing(directory / RECEIPT):
        replace_file(directory / RECEIPT, json.dumps({"dataset": url}) + "\n")


def _is_here(path: Path, found: StoredObject) -> bool:
    """Tell whether a file is this object: by size and time, as `aws s3 sync` does, not one of another preparation."""
    here = path.stat() if path.is_file() else None
    return here is not None and here.st_size == found.size_bytes and abs(here.st_mtime - found.written_at) < CLOCK_TICK


def _check(url: str, directory: Path, objects: Collection[str], missing_bytes: int) -> None:
    if not any(name.endswith(TOKENS) for name in objects):
        raise BadInput(f"dataset {url}: got no token files there, wanted train.safetensors, or shards (.bin, .npy)")
    here = [path.name for path in directory.glob("[!.]*") if path.name.endswith(TOKENS)]
    if strange := sorted({*here} - {*objects}):
        raise BadInput(f"{directory / strange[0]}: is not in {url}, but of another preparation; delete it")
    existing, free_bytes = free_disk(directory)
    if missing_bytes > free_bytes:
        raise BadInput(
            f"dataset {url}: got {free_bytes / 1e9:.1f} GB free at {existing}, wanted {missing_bytes / 1e9:.1f} GB; "
            "free some, or pass --token-files DIR on a larger disk"
        )
