"""Contents of token files, checked against the manifest: every file that is read must be listed, and unchanged."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common.errors import BadInput
from common.files import BLOCK_BYTES
from tokens.format.header import TokenFile, readable_tokens
from tokens.format.manifest import MANIFEST, SPLITS, Content, Manifest, advice, is_of, read_manifest
from tokens.format.token_file import TokenStream, open_split


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
            raise BadInput(f"{file.path}: not listed in {MANIFEST}; {advice(directory / MANIFEST)}")
        got, wanted = file.path.stat().st_size, manifest.files[file.path.name].size_bytes
        if got != wanted:
            raise BadInput(
                f"{file.path}: got {got} bytes, wanted {wanted} by {MANIFEST}; the file or the manifest is from "
                "another preparation: prepare or download both again"
            )
    return stream


def has_split(directory: Path, split: str = "train", manifest: Manifest | None = None) -> bool:
    """Return whether a directory holds, or its manifest lists, files of a split."""
    names = [path.name for path in directory.glob("*")]
    if any(is_of(name, split) for name in [*names, *([] if manifest is None else manifest.files)]):
        return True
    from tokens.format.foreign_files import parse_name

    return any(parsed.split == split for parsed in map(parse_name, names) if parsed is not None)


def read_finished(directory: Path) -> Manifest | None:
    """Return the manifest of a finished preparation, None before. Raises BadInput unless its files are there."""
    manifest = read_manifest(directory)
    for split in SPLITS:
        if manifest is not None and any(is_of(name, split) for name in manifest.files):
            open_listed(directory, split, manifest)
    return manifest


def read_contents(files: list[TokenFile], manifest: Manifest | None) -> dict[str, Content]:
    """Read whole files, several at once; return their contents by name.

    Raises BadInput naming a file that cannot be read, or differs from its manifest entry.
    """
    with ThreadPoolExecutor() as threads:  # reading and hashing leave the interpreter to other threads
        contents = dict(zip([file.path.name for file in files], threads.map(read_content, files), strict=True))
    if manifest is None:
        return contents
    for path in [file.path for file in files]:
        content, wanted, where = contents[path.name], manifest.files[path.name], path.with_name(MANIFEST)
        if content.sha256 != wanted.sha256:
            raise BadInput(
                f"{path}: damaged: got sha256 {content.sha256[:12]}..., wanted {wanted.sha256[:12]}... by {MANIFEST}; "
                "prepare or download it again"
            )
        if content.max_id != wanted.max_id:
            raise BadInput(f"{where}: damaged: its max_id of {path.name} is not {content.max_id}; {advice(where)}")
    return contents


def read_content(file: TokenFile) -> Content:
    """Read a whole token file; return its content. Raises BadInput when it cannot be read."""
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
