"""Verification of a checkpoint: its files against its manifest, its state against its files."""

import stat
from pathlib import Path

from common.errors import BadInput
from common.files import sha256, system_error
from common.json_files import parse_json, read_json, read_regular
from training.checkpoints.checkpoint_manifest import MANIFEST_FORMAT, manifest_entries
from training.checkpoints.saved_state import FORMAT, check_origin
from training.checkpoints.storage import MANIFEST, STATE, Checkpoint, FileDigest


def verify(checkpoint: Checkpoint) -> str | None:
    """Return what is wrong with a checkpoint, or None when every file is as it was written."""
    manifest = checkpoint.file(MANIFEST)
    try:
        files = _read_manifest(manifest)
        for name, entry in sorted(files.items()):
            _compare(checkpoint.file(name), entry)
        if read_json(checkpoint.file(STATE)).get("format") == FORMAT:  # `read_state` refuses another version's
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


def _read_manifest(path: Path) -> dict[str, FileDigest]:
    """Return the entries. Raises BadInput for another version's manifest, any error for a damaged one."""
    content = read_regular(path)
    found = parse_json(content)["format"]
    if found < MANIFEST_FORMAT:
        raise BadInput(f"{path}: got format {found}, wanted {MANIFEST_FORMAT}: of another version")
    return manifest_entries(content)


def _compare(file: Path, entry: FileDigest) -> None:
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise BadInput(f"{file}: wanted a regular file")
    if found.st_size != entry.size_bytes:
        raise BadInput(f"{file}: got {found.st_size} bytes, wanted {entry.size_bytes}")
    if sha256(file) != entry.sha256:
        raise BadInput(f"{file}: damaged: its sha256 is not the one in {MANIFEST}")
