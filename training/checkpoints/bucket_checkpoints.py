"""Checkpoints in a bucket: the objects that one has there, retention and download."""

import hashlib
from pathlib import Path

from common.bucket import Bucket
from common.errors import BadInput
from common.files import writing
from common.json_files import parse_json
from training.checkpoints.atomic_commit import write_copy
from training.checkpoints.directory import MANIFEST, STATE, STEP_NAME, TENSOR_FILES, name_of
from training.checkpoints.saved_state import (
    FileDigest,
    check_format,
    check_identity,
    manifest_entries,
    manifest_text,
    parse_state,
    read_state,
)

NEWEST = ("auto", "latest")  # names of the newest intact checkpoint; the object `latest` is for people


def complete_steps(bucket: Bucket) -> list[str]:
    """Return the names of the complete checkpoints in a bucket, oldest first."""
    return sorted(name for name, files in _folders(bucket).items() if MANIFEST in files)


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


def candidates(bucket: Bucket, wanted: str) -> list[str]:
    """Return the names to resume from, the best one first: of NEWEST all, the newest first; of "best" its target."""
    steps = complete_steps(bucket)
    if wanted in NEWEST:
        return steps[::-1]
    if wanted == "best":
        wanted = _linked(bucket, wanted)
    return [name for name in steps if name == wanted]


def check_branch(bucket: Bucket, step: int, wanted: str) -> None:
    """Raise BadInput where a run that goes on from a step, or from 0, would mix with later checkpoints of another."""
    later = [name for name in complete_steps(bucket) if name > name_of(step)]
    if later and wanted not in NEWEST:
        here = f"{name_of(step)} is on this disk, " if step > 0 else ""
        raise BadInput(
            f"{bucket.url}: holds {later[-1]}, and --resume {wanted} begins before it; nothing in a bucket is moved "
            f"away: {here}set checkpoints to another prefix, or delete what is there"
        )


def prune_bucket(bucket: Bucket, name: str, best: str | None, keep: int) -> None:
    """Write `latest` and `best`; delete what kills have left, and older checkpoints.

    The best and the newest `keep` stay, and later ones, which were not intact. `best`: of the run; where the bucket
    lacks it, the one that it has stays.
    """
    folders = _folders(bucket)
    steps = sorted(each for each, files in folders.items() if MANIFEST in files)
    bucket.write("latest", name.encode())
    if best in steps:
        bucket.write("best", str(best).encode())
    else:
        best = _linked(bucket, "best")
    kept = {best, *[each for each in steps if each <= name][-keep:], *(each for each in steps if each >= name)}
    old = {each: files for each, files in folders.items() if each not in kept}
    bucket.delete([f"{each}/{MANIFEST}" for each, files in old.items() if MANIFEST in files])  # first: none is partial
    bucket.delete([f"{each}/{file}" for each, files in old.items() for file in files - {MANIFEST}])


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


def _linked(bucket: Bucket, link: str) -> str:
    """Return the name that a link of the bucket refers to; an empty one where there is no such link."""
    found = bucket.read(link)
    return "" if found is None else found.content.decode(errors="replace").strip()


def _folders(bucket: Bucket) -> dict[str, set[str]]:
    """Return the files of each checkpoint, complete or not, by its name."""
    folders: dict[str, set[str]] = {}
    for path in bucket.objects():
        name, _, file = path.partition("/")
        if STEP_NAME.fullmatch(name) and file:
            folders.setdefault(name, set()).add(file)
    return folders
