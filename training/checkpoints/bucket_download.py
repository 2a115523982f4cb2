"""Download of a checkpoint from a bucket to the disk."""

import hashlib
from pathlib import Path

from common.bucket import Bucket
from common.files import writing
from common.json_files import parse_json
from training.checkpoints.atomic_commit import write_copy
from training.checkpoints.directory import MANIFEST, STATE, TENSOR_FILES
from training.checkpoints.saved_state import (
    FileDigest,
    check_format,
    check_identity,
    manifest_entries,
    manifest_text,
    parse_state,
)


def fetch(bucket: Bucket, checkpoint: Path) -> str | None:
    """Download a checkpoint to a disk that has no checkpoint of this name.

    Returns a description of the damage if the checkpoint in the bucket is damaged; otherwise None. Raises BadInput if
    the bucket cannot be read, if the disk cannot be written, or if another version of Lockstep wrote the checkpoint.
    """
    name, address = checkpoint.name, f"{bucket.url}/{checkpoint.name}"
    objects = bucket.objects(name)
    try:
        small = {file: bucket.read(f"{name}/{file}") for file in (MANIFEST, STATE)}
        contents = {file: version.content for file, version in small.items() if version is not None}
        entries, state = manifest_entries(contents[MANIFEST]), contents[STATE]
        check_format(values := parse_json(state), f"{address}/{STATE}")
        try:  # state and manifest are not compared: the state is uploaded first, so the manifest may be an older one
            check_identity(name, parse_state(values), {file: entries[file].sha256 for file in TENSOR_FILES})
        except ValueError as error:
            raise ValueError(f"{STATE}: {error}") from error
        pieces = {file: bucket.pieces(f"{name}/{file}", objects[f"{name}/{file}"].size_bytes) for file in TENSOR_FILES}
    except (ValueError, KeyError, TypeError) as error:
        return f"{address}: damaged: {error}{' is missing' if isinstance(error, KeyError) else ''}"
    manifest = manifest_text(entries | {STATE: FileDigest(len(state), hashlib.sha256(state).hexdigest())}).encode()
    with writing(checkpoint):
        small_files = {STATE: [(0, memoryview(state))], MANIFEST: [(0, memoryview(manifest))]}
        problem = write_copy(checkpoint, {**pieces, **small_files})
    return None if problem is None else problem.replace(str(checkpoint), address)
