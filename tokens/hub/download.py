"""Download of token files from the Hugging Face hub: once per machine, resumable, only where the disk has room."""

import json
import shutil
from pathlib import Path

from common.errors import BadInput
from common.files import replace_file, writing
from common.hub_client import hub_errors, quiet
from common.json_files import read_json
from tokens.format.contents import has_split

RECEIPT = "download.json"  # written last: without it a download is incomplete
PATTERNS = ["*.safetensors", "*.json", "*.tiktoken"]


def download_dataset(dataset: str, directory: Path) -> None:
    """Download the token files of a hub dataset, "OWNER/NAME", unless the directory has them.

    Raises BadInput when the hub cannot be reached, refuses, or the disk is too small.
    """
    if is_complete(directory):
        return
    from huggingface_hub import snapshot_download

    where = f"dataset {dataset}"
    problem = f"{where}: cannot be downloaded into {directory}"
    quiet()
    with hub_errors(problem, "read", ", or pass --token-files DIR with files that you have"):
        planned = snapshot_download(
            dataset, repo_type="dataset", local_dir=directory, allow_patterns=PATTERNS, dry_run=True
        )
        wanted_bytes = sum(file.file_size or 0 for file in planned if file.will_download)
        existing = next(parent for parent in [directory, *directory.absolute().parents] if parent.exists())
        free_bytes = shutil.disk_usage(existing).free
        if wanted_bytes > free_bytes:
            raise BadInput(
                f"{where}: got {free_bytes / 1e9:.1f} GB free at {existing}, wanted {wanted_bytes / 1e9:.1f} GB; "
                "free some, or pass --token-files DIR on a larger disk"
            )
        snapshot_download(dataset, repo_type="dataset", local_dir=directory, allow_patterns=PATTERNS)
    with writing(directory / RECEIPT):
        replace_file(directory / RECEIPT, json.dumps({"dataset": dataset, "bytes": wanted_bytes}) + "\n")


def is_complete(directory: Path) -> bool:
    """Tell whether the directory holds a complete download, or token files from elsewhere."""
    if (directory / RECEIPT).is_file():
        return True
    return not (directory / ".cache").exists() and has_split(directory)


def hub_name(directory: Path) -> str | None:
    """Return OWNER/NAME of the dataset that was downloaded into a directory, or None."""
    receipt = directory / RECEIPT
    if not receipt.is_file():
        return None
    dataset = read_json(receipt, advice="delete it").get("dataset")
    return dataset if isinstance(dataset, str) else None
