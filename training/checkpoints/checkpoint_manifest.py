"""`manifest.json` of a checkpoint: size and sha256 of its files, written last."""

import hashlib
import json
from collections.abc import Mapping

import attrs

from common.json_files import parse_json
from training.checkpoints.storage import OPTIMIZER, STATE, WEIGHTS, FileDigest

MANIFEST_FORMAT = 2


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
