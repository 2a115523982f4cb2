"""Checkpoints in a bucket: retention and download."""

import hashlib
from pathlib import Path

from common.bucket import Bucket
from common.errors import BadInput
from common.files import writing
from common.json_files import parse_json
from training.checkpoints.atomic_commit import write_copy
from training.checkpoints.directory import MANIFEST, STATE, TENSOR_FILES
from training.checkpoints.lookup import complete_steps
from training.checkpoints.saved_state import (
    FileDigest,
    check_format,
    check_identity,
    manifest_entries,
    manifest_text,
    parse_state,
    read_state,
)


def holds(bucket: Bucket, checkpoint: Path) -> bool:
    """Tell whether a bucket has a checkpoint, its state intact. Raises BadInput for another run's of its name."""
    state = bucket.read(f"{checkpoint.name}/{STATE}")
    if state is None or checkpoint.name not in complete_steps(bucket):
        return False
    try:
        theirs = parse_state(parse_json(state.content)).state_sha256
    except (ValueError, KeyError, TypeError):
        return False
    if theirs != read_state(checkpoint).state_sha256:
        raise BadInput(
            f"{bucket.url}/{checkpoint.name}: of another run than {checkpoint}: state_sha256 differs; set checkpoints "
            "to another prefix, or move those of the disk away"
        )
    return True


def fetch(bucket: Bucket, checkpoint: Path) -> str | None:
    """Download a checkpoint to the disk, where none has its name; return its damage, or None. Raises BadInput."""
    name, address = checkpoint.name, f"{bucket.url}/{checkpoint.name}"
    found = bucket.objects(name)
    try:
        small = {file: bucket.read(f"{name}/{file}") for file in (MANIFEST, STATE)}
        contents = {file: version.content for file, version in small.items() if version is not None}
        wanted, state = manifest_entries(contents[MANIFEST]), contents[STATE]
        check_format(values := parse_json(state), f"{address}/{STATE}")
        try:  # its own sha256 may be newer than the manifest's, which is uploaded last
            check_identity(name, parse_state(values), {file: wanted[file].sha256 for file in TENSOR_FILES})
        except ValueError as error:
            raise ValueError(f"{STATE}: {error}") from error
        pieces = {file: bucket.pieces(f"{name}/{file}", found[f"{name}/{file}"].size_bytes) for file in TENSOR_FILES}
    except (ValueError, KeyError, TypeError) as error:
        return f"{address}: damaged: {error}{' is missing' if isinstance(error, KeyError) else ''}"
    manifest = manifest_text(wanted | {STATE: FileDigest(len(state), hashlib.sha256(state).hexdigest())}).encode()
    with writing(checkpoint):
        small_files = {STATE: [(0, memoryview(state))], MANIFEST: [(0, memoryview(manifest))]}
        problem = write_copy(checkpoint, {**pieces, **small_files})
    return None if problem is None else problem.replace(str(checkpoint), address)
