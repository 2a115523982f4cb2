"""Verification of a checkpoint against its `manifest.json`, sizes and sha256, written last; the newest intact one.

A checkpoint without an intact manifest does not exist.
"""

import hashlib
import json
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs

from common.errors import BadInput, printable
from common.files import is_folder, sha256, system_error
from common.json_files import parse_json, read_json, read_regular
from training.checkpoints.directory import (
    LINKS,
    MANIFEST,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    dereferenced_links,
    link_target,
    name_of,
    names_in,
    steps_in,
)
from training.checkpoints.saved_state import STATE_FORMAT, check_origin

MANIFEST_FORMAT = 2


@attrs.frozen
class FileDigest:
    """Size and hash of a file: its entry in the manifest."""

    size_bytes: int
    sha256: str


def manifest_text(files: Mapping[str, FileDigest]) -> str:
    """Return the manifest of files by name; it carries a sha256 of itself."""
    entries = {name: attrs.asdict(entry) for name, entry in files.items()}
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    manifest = {"format": MANIFEST_FORMAT, "files": entries, "files_sha256": digest}
    return json.dumps(manifest, indent=2, sort_keys=True) + "\n"


def manifest_entries(content: bytes) -> dict[str, FileDigest]:
    """Return the entries. Raises ValueError, KeyError or TypeError for a damaged manifest."""
    values = parse_json(content)
    files = {name: FileDigest(**entry) for name, entry in values["files"].items()}
    if manifest_text(files).encode() != content or set(files) != {WEIGHTS, OPTIMIZER, STATE}:
        raise ValueError("it does not have its own sha256")
    return files


def verify(checkpoint: Path) -> str | None:
    """Return the damage of a checkpoint, or None when every file is as it was written."""
    manifest = checkpoint / MANIFEST
    try:
        files = manifest_entries(read_regular(manifest))
        for name, entry in sorted(files.items()):
            _compare(checkpoint / name, entry)
        if read_json(checkpoint / STATE).get("format") == STATE_FORMAT:  # `read_state` refuses another version's
            check_origin(checkpoint, {name: entry.sha256 for name, entry in files.items()})
    except BadInput as error:
        return str(error)
    except FileNotFoundError as error:
        return f"{error.filename}: missing"
    except OSError as error:
        return system_error(error) if error.filename else f"{manifest}: {error}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{manifest}: damaged: {error}"
    return None


def find(directory: Path, wanted: str) -> Path | None:
    """Return the checkpoint to resume from: "auto" is the newest complete one, or None where there is none at all.

    Raises BadInput when checkpoints exist but none verifies, or the named one is missing or damaged.
    """
    if wanted != "auto":
        return _find_named(directory, wanted)
    problems: list[str] = []
    steps = [directory / name for name in reversed(steps_in(directory))]
    for checkpoint in [*steps, *dereferenced_links(directory)]:  # the latter are damaged, or were renamed
        problem = verify(checkpoint)
        if problem is None:
            for line in problems:
                print(printable(f"WARNING: {line}; falling back to {checkpoint.name}"), file=sys.stderr)
            return checkpoint
        problems.append(problem)
    if problems:
        raise BadInput(
            f"{problems[0]}; no other checkpoint is intact: copy it here again, or start anew with --resume never"
        )
    _check_leftovers(directory)
    return None


def find_before(directory: Path, step: int) -> Path | None:
    """Return the newest complete checkpoint from which `step` is still to come, or None to begin at the start."""
    earlier = [directory / name for name in reversed(steps_in(directory)) if name < name_of(step)]
    return next((checkpoint for checkpoint in earlier if verify(checkpoint) is None), None)


def _compare(file: Path, entry: FileDigest) -> None:
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise BadInput(f"{file}: wanted a regular file")
    if found.st_size != entry.size_bytes:
        raise BadInput(f"{file}: got {found.st_size} bytes, wanted {entry.size_bytes}")
    if sha256(file) != entry.sha256:
        raise BadInput(f"{file}: damaged: its sha256 is not the one in {MANIFEST}")


def _find_named(directory: Path, name: str) -> Path:
    target = link_target(directory / name)
    if not is_folder(directory / name):
        reason = "no such checkpoint" if target is None else f"refers to {target}, which does not exist"
        raise BadInput(f"{directory / name}: {reason}; there are {', '.join(names_in(directory)) or 'none'}")
    if problem := verify(directory / name):
        raise BadInput(f"{problem}; resume from another one with --resume NAME")
    return directory / (target or name)


def _check_leftovers(directory: Path) -> None:
    """Without a checkpoint of the run: raise BadInput for a broken link, and mention copies under other names."""
    copies = [name for name in names_in(directory) if (directory / name / MANIFEST).is_file()]
    for link in LINKS:
        target = link_target(directory / link)
        if target is not None:  # its checkpoint was not copied, or deleted by hand
            instead = f"continue from a copy with --resume {copies[0]}" if copies else "copy it here again"
            raise BadInput(
                f"{directory / link}: refers to {target}, which does not exist; {instead}, or start anew with "
                "--resume never"
            )
    if copies:
        found = f"{directory}: found only {', '.join(copies)}"
        print(printable(f"NOTE: {found}; --resume {copies[0]} continues from it"))
