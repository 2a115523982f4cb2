"""`manifest.json` of a checkpoint: size and sha256 of its files, written last; verification against it."""

import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path

import attrs

from common.errors import BadInput
from common.files import sha256, system_error
from common.json_files import parse_json, read_json, read_regular
from training.checkpoints.saved_state import FORMAT, STATE, check_origin
from training.checkpoints.storage import Checkpoint, FileDigest
from training.checkpoints.tensor_files import OPTIMIZER, WEIGHTS

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 2


def manifest_text(files: Mapping[str, FileDigest]) -> str:
    """Return the manifest of files by name; it carries a sha256 of itself."""
    entries = {name: attrs.asdict(entry) for name, entry in files.items()}
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    manifest = {"format": MANIFEST_FORMAT, "files": entries, "files_sha256": digest}
    return json.dumps(manifest, indent=2, sort_keys=True) + "\n"


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


def manifest_entries(content: bytes) -> dict[str, FileDigest]:
    """Return the entries. Raises ValueError, KeyError or TypeError for a damaged manifest."""
    values = parse_json(content)
    files = {name: FileDigest(**entry) for name, entry in values["files"].items()}
    if manifest_text(files).encode() != content or set(files) != {WEIGHTS, OPTIMIZER, STATE}:
        raise ValueError("it does not have its own sha256")
    return files


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
