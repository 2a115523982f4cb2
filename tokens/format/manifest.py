"""`manifest.json`, what was written into the token files beside it; and a look at whether they still hold it.

The manifest is optional: a directory with nothing but token files loads. Where there is one, every file that is read is
in it, and is as it was written.
"""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.errors import BadInput, quoted
from common.files import BLOCK_BYTES, sha256
from common.json_files import parse_json, read_regular
from tokens.format.splits import SPLITS
from tokens.format.token_file import TokenFile, TokenStream, open_split, readable_tokens
from tokens.tokenizer.tokenizer import RANKS_FILE

MANIFEST = "manifest.json"
FORMAT = 1


@attrs.frozen(kw_only=True)
class Content:
    """What one token file holds, as its manifest's entry keeps it."""

    size_bytes: int
    sha256: str  # of the whole file
    max_id: int  # 0 where there is no token


@attrs.frozen
class Manifest:
    """What a preparation wrote."""

    files: dict[str, Content]  # by name
    tokenizer: dict[str, Any]  # name, vocabulary_size, end_of_text_id, ranks_file
    values: dict[str, Any]  # all that it says


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a token directory, or None without one of ours. Raises BadInput for a damaged one."""
    path = directory / MANIFEST
    with readable_tokens(path):
        if not path.exists() and not path.is_symlink():
            return None
    try:
        values = parse_json(read_regular(path), None)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: damaged: {error}; {_advice(path)}") from error
    # One flipped bit spoils one key: what still has the others is ours, and damaged.
    if not isinstance(values, dict) or not (values.get("format") == FORMAT or {"files", "tokenizer"} <= values.keys()):
        return None  # somebody else's file of that name
    match values:
        case {"format": int(version), "files": dict(files), "tokenizer": dict(tokenizer)} if version == FORMAT:
            _check_tokenizer(path, tokenizer)
            return Manifest({name: _entry(path, name, value) for name, value in files.items()}, tokenizer, values)
    raise BadInput(f"{path}: damaged: wanted format {FORMAT}, files and tokenizer; {_advice(path)}")


def manifest_text(values: dict[str, Any]) -> str:
    """Return the text of a manifest."""
    return json.dumps({"format": FORMAT, **values}, indent=2) + "\n"


def open_listed(directory: Path, split: str, manifest: Manifest | None) -> TokenStream:
    """Open a split whose files are those of the manifest, by name and size; their content is not read yet.

    Raises BadInput naming the file.
    """
    if manifest is None:
        return open_split(directory, split)
    for name in manifest.files:
        with readable_tokens(directory / name):
            missing = is_of(name, split) and not (directory / name).is_file()
        if missing:
            raise BadInput(f"{directory / name}: missing, but {MANIFEST} lists it; prepare or download it again")
    stream = open_split(directory, split)
    for file in stream.files:
        if file.path.name not in manifest.files:
            raise BadInput(f"{file.path}: not listed in {MANIFEST}; {_advice(directory / MANIFEST)}")
        got, wanted = file.path.stat().st_size, manifest.files[file.path.name].size_bytes
        if got != wanted:
            raise BadInput(
                f"{file.path}: got {got} bytes, wanted {wanted} by {MANIFEST}; the file or the manifest is from "
                "another preparation: prepare or download both again"
            )
    return stream


def read_finished(directory: Path) -> dict[str, Any] | None:
    """Return what a finished preparation's manifest says, None before. Raises BadInput unless its files are there."""
    manifest = read_manifest(directory)
    if manifest is None:
        return None
    for split in SPLITS:
        if any(is_of(name, split) for name in manifest.files):
            open_listed(directory, split, manifest)
    return manifest.values


def is_of(name: str, split: str) -> bool:
    """Tell whether a file of that name, or a shard, is of a split."""
    return re.fullmatch(rf"{split}(-\d+-of-\d+)?\.safetensors", name) is not None


def read_contents(files: list[TokenFile], manifest: Manifest | None) -> dict[str, Content]:
    """Read files from the first byte to the last, several at once; return what they hold, by name.

    Raises BadInput naming a file that cannot be read, or does not hold what the manifest says.
    """
    with ThreadPoolExecutor() as threads:  # reading and hashing leave the interpreter to other threads
        contents = dict(zip([file.path.name for file in files], threads.map(read_content, files), strict=True))
    for file in files:
        _compare(file.path, contents[file.path.name], manifest)
    return contents


def read_content(file: TokenFile) -> Content:
    """Return what a token file holds. Raises BadInput when it cannot be read."""
    digest, largest = hashlib.sha256(), 0
    try:
        with file.path.open("rb") as opened:
            digest.update(opened.read(file.offset_bytes))
            while data := opened.read(BLOCK_BYTES):
                digest.update(data)
                largest = max(largest, int(np.frombuffer(data, file.dtype).max()))
            size = opened.tell()
    except OSError as error:
        said = error.strerror or error
        raise BadInput(f"{file.path}: cannot be read: {said}; prepare or download it again") from error
    return Content(size_bytes=size, sha256=digest.hexdigest(), max_id=largest)


def _compare(path: Path, content: Content, manifest: Manifest | None) -> None:
    wanted = content if manifest is None else manifest.files[path.name]
    if content.sha256 != wanted.sha256:
        raise BadInput(
            f"{path}: damaged: got sha256 {content.sha256[:12]}..., wanted {wanted.sha256[:12]}... by {MANIFEST}; "
            "prepare or download it again"
        )
    if content != wanted:
        where = path.with_name(MANIFEST)
        raise BadInput(f"{where}: damaged: its max_id of {path.name} is not {content.max_id}; {_advice(where)}")


def _entry(path: Path, name: str, value: Any) -> Content:
    match value:
        case {"size_bytes": int(size), "sha256": str(digest), "max_id": int(largest)}:
            return Content(size_bytes=size, sha256=digest, max_id=largest)
    raise BadInput(f"{path}: damaged: files: {name}: wanted size_bytes, sha256 and max_id; {_advice(path)}")


def _check_tokenizer(path: Path, values: dict[str, Any]) -> None:
    match values:
        case {
            "name": str(),
            "vocabulary_size": int(),
            "end_of_text_id": int(),
            "ranks_file": None | str() as ranks_file,
        }:
            if ranks_file is not None:
                _check_ranks(path, ranks_file, values.get("ranks_sha256"))
        case _:
            raise BadInput(
                f"{path}: damaged: tokenizer: wanted name, vocabulary_size, end_of_text_id and ranks_file; "
                f"{_advice(path)}"
            )


def _check_ranks(path: Path, name: str, wanted: Any) -> None:
    """Raise BadInput unless the byte-pair ranks are beside the manifest; `wanted`: their sha256, None in older ones."""
    if name != RANKS_FILE:  # every reader opens that one
        raise BadInput(f"{path}: tokenizer: ranks_file: got {quoted(name)}, wanted '{RANKS_FILE}'; {_advice(path)}")
    ranks = path.parent / name
    if not ranks.is_file():
        raise BadInput(f"{ranks}: missing, but {MANIFEST} names it; {_advice(path)}")
    if wanted is None:
        return
    with readable_tokens(ranks):
        got = sha256(ranks)
    if got != wanted:
        raise BadInput(
            f"{ranks}: damaged: got sha256 {got[:12]}..., wanted {quoted(wanted)} by {MANIFEST}; prepare or download "
            "it again"
        )


def _advice(path: Path) -> str:
    return f"prepare or download the tokens again, or delete {path.name} to use the files as they are"
