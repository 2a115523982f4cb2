"""Checkpoints in a bucket: the objects that one has there, its publication, retention and download."""

import hashlib

from common.bucket import Bucket
from common.errors import BadInput
from common.files import write_error
from common.json_files import parse_json
from training.checkpoints.checkpoint_manifest import manifest_entries, manifest_text
from training.checkpoints.saved_state import parse_state
from training.checkpoints.storage import (
    LINKS,
    MANIFEST,
    OPTIMIZER,
    STATE,
    STEP_NAME,
    WEIGHTS,
    FileDigest,
    NewFile,
    Storage,
    name_of,
)
from training.checkpoints.tensor_files import combined_sha256

TENSOR_FILES = (OPTIMIZER, WEIGHTS)  # the larger one first


def complete_steps(bucket: Bucket) -> list[str]:
    """Return the names of the complete checkpoints in a bucket, oldest first."""
    return sorted(name for name, files in _folders(bucket).items() if MANIFEST in files)


def candidates(bucket: Bucket, wanted: str) -> list[str]:
    """Return the names to resume from, the best one first: "auto" is the newest, a link what it refers to."""
    steps = complete_steps(bucket)
    if wanted in LINKS:
        link = bucket.read(wanted)
        wanted = "" if link is None else link.content.decode(errors="replace")
    return steps[::-1] if wanted == "auto" else [name for name in steps if name == wanted]


def check_branch(bucket: Bucket, step: int, wanted: str) -> None:
    """Raise BadInput where a run that goes on from a step, or from 0, would mix with later checkpoints of another."""
    later = [name for name in complete_steps(bucket) if name > name_of(step)]
    if later and wanted != "auto":
        raise BadInput(
            f"{bucket.url}: holds {later[-1]}, and --resume {wanted} begins before it; nothing in a bucket is moved "
            "away: set checkpoints to another prefix, or delete what is there"
        )


def publish(bucket: Bucket, name: str, small: dict[str, bytes]) -> None:
    """Complete an uploaded checkpoint, in the place of an older one of its name: its state, then its manifest.

    A kill in between leaves a new state beside an old manifest; both are of the same tensor files, and `fetch` takes
    them.
    """
    bucket.write(f"{name}/{STATE}", small[STATE])
    manifest = f"{name}/{MANIFEST}"
    bucket.replace(manifest, small[MANIFEST], bucket.read(manifest))


def tidy(bucket: Bucket, name: str, best: str | None, keep: int) -> None:
    """Write `latest` and `best`; delete all but these and the newest `keep` checkpoints, and what kills have left."""
    folders = _folders(bucket)
    steps = sorted(each for each, files in folders.items() if MANIFEST in files)
    bucket.write("latest", name.encode())
    if best in steps:
        bucket.write("best", str(best).encode())
    kept = {name, best, *steps[-keep:]}
    old = {each: files for each, files in folders.items() if each not in kept}
    bucket.delete([f"{each}/{MANIFEST}" for each, files in old.items() if MANIFEST in files])  # first: none is partial
    bucket.delete([f"{each}/{file}" for each, files in old.items() for file in files - {MANIFEST}])


def fetch(bucket: Bucket, name: str, storage: Storage) -> str | None:
    """Download a checkpoint to the disk, where no other has its name; return why it is damaged, or None.

    Raises BadInput where the bucket does not answer, or the disk is full.
    """
    small = {file: bucket.read(f"{name}/{file}") for file in (MANIFEST, STATE)}
    sizes = bucket.sizes(name)
    try:
        contents = {file: version.content for file, version in small.items() if version is not None}
        wanted = manifest_entries(contents[MANIFEST])
        parse_state(parse_json(contents[STATE]))
        files = {file: NewFile(b"", sizes[f"{name}/{file}"]) for file in TENSOR_FILES}
    except (ValueError, KeyError, TypeError) as error:
        return f"{bucket.url}/{name}: damaged: {error}"
    try:
        storage.begin(name, files)
        for file, new in files.items():
            storage.write_rows(name, file, bucket.pieces(f"{name}/{file}", new.size_bytes))
        found = {file: storage.entry(name, file) for file in TENSOR_FILES}
        problem = _compare(found, wanted, contents[STATE])
        if problem is None:
            storage.put(name, STATE, contents[STATE])
            found[STATE] = storage.entry(name, STATE)
            storage.put(name, MANIFEST, manifest_text(found).encode())
            storage.publish(name)
            return None
    except BadInput:
        storage.discard(name)
        raise
    except OSError as error:
        storage.discard(name)
        raise write_error(storage.where(name), error) from error
    storage.discard(name)
    return f"{bucket.url}/{name}: {problem}"


def _compare(found: dict[str, FileDigest], wanted: dict[str, FileDigest], text: bytes) -> str | None:
    """Return which of the files is damaged, or None. The state may be newer than the manifest: see `publish`."""
    for file, entry in found.items():
        if entry != wanted[file]:
            return f"{file}: damaged: its sha256 is not the one in {MANIFEST}"
    state = parse_state(parse_json(text))
    if hashlib.sha256(text).hexdigest() == wanted[STATE].sha256:
        return None
    if state.state_sha256 == combined_sha256(state.position.step, {file: each.sha256 for file, each in found.items()}):
        return None
    return f"{STATE}: damaged: its sha256 is not the one in {MANIFEST}"


def _folders(bucket: Bucket) -> dict[str, set[str]]:
    """Return the files of each checkpoint, complete or not, by its name."""
    folders: dict[str, set[str]] = {}
    for path in bucket.sizes():
        name, _, file = path.partition("/")
        if STEP_NAME.fullmatch(name) and file:
            folders.setdefault(name, set()).add(file)
    return folders
