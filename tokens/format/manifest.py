"""Manifest of a token directory: which files were prepared, with which tokenizer, from which sources.

It is optional: a directory with nothing but token files loads. Where there is one, every file that is read must be
listed, and its content unchanged.
"""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.checks import structured
from common.errors import BadInput, refusing
from common.files import BLOCK_BYTES, sha256
from common.json_files import parse_json, read_regular
from common.text import quoted
from tokens.format.header import WEIGHT, TokenFile, read_header, readable_tokens
from tokens.format.token_file import TokenStream, open_split

SPLITS = ("train", "validation", "test")
MANIFEST = "manifest.json"
RANKS_FILE = "tokenizer.tiktoken"  # copy of the byte-pair ranks beside token files
PLAN = "plan.json"  # of tokens that are still being prepared
FORMAT = 1
SAME_IN_EXTENSIONS = ("end_of_text_id", "pattern", "structure", "characters")  # of a tokenizer and one that extends it


@attrs.frozen(kw_only=True)
class Content:
    """Identity of a token file's content."""

    size_bytes: int
    sha256: str  # of the whole file
    max_id: int  # 0 where there is no token


@attrs.frozen(kw_only=True)
class FileEntry(Content):
    """A token file in the manifest."""

    tokens: int
    dtype: str  # numpy's name


def _check_structure(_: Any, attribute: "attrs.Attribute[str | None]", value: str | None) -> None:
    """Raise ValueError unless a record's structure is None or one whose added tokens can be read."""
    if value is not None:
        try:
            added_tokens(value)
        except ValueError as error:
            raise ValueError(f"{attribute.name}: {error}") from error


@attrs.frozen(kw_only=True)
class TokenizerRecord:
    """The tokenizer of token files."""

    name: str
    vocabulary_size: int
    end_of_text_id: int
    fingerprint: str | None = None  # tokens.tokenizer.tokenizer.fingerprint; None in older manifests
    ranks_file: str | None  # byte-pair ranks beside the manifest
    ranks_sha256: str | None = None  # None in older manifests
    characters: str | None = None  # of a character tokenizer, in the order of their ids
    pattern: str | None = None  # splitting pattern of byte pairs; None for GPT-2's ranks
    # JSON of normalizer, pre_tokenizer and added_tokens of tokenizer.json, if no pattern says how a text is split
    structure: str | None = attrs.field(default=None, validator=_check_structure)
    special_tokens: dict[str, int] | None = attrs.field(default=None, hash=False)  # None: the end of text alone
    template: str | None = None  # Jinja text of conversations; None for plain text

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON, without unknown values."""
        return attrs.asdict(self, filter=lambda field, value: value is not None or field.default is attrs.NOTHING)

    @property
    def all_special_tokens(self) -> dict[str, int]:
        """The special tokens, the end of text included."""
        return self.special_tokens or {"<|endoftext|>": self.end_of_text_id}

    @property
    def identity(self) -> str | None:
        """Identity of the ids that it gives to texts, as `identity_of` states it; None in older manifests."""
        return None if self.fingerprint is None else identity_of(self.fingerprint, self.structure)

    def extends(self, other: "TokenizerRecord") -> bool:
        """Tell whether all ids of another record mean the same here: special tokens may have been added at the end."""
        kept, here = other.all_special_tokens, self.all_special_tokens
        added = here.keys() - kept.keys()
        return (
            kept.items() <= here.items()
            and {here[name] for name in added} == {*range(other.vocabulary_size, self.vocabulary_size)}
            and all(
                getattr(self, key) == getattr(other, key)
                for key in ("end_of_text_id", "pattern", "structure", "characters")
            )
            and len({self.fingerprint, other.fingerprint} - {None}) < 2
        )


@attrs.frozen(kw_only=True)
class SourceRecord:
    """One source of documents."""

    name: str
    files: int
    bytes: int


@attrs.frozen(kw_only=True)
class SplitRecord:
    """Split rule of a preparation."""

    kind: str
    seed: int
    # Splits that got the last documents because no hash, or the hashes of too few documents, fell to them.
    from_tail: list[str] = attrs.field(factory=list)
    # Splits whose last documents went to the end of train because the hashes of too many documents fell to them.
    shortened: list[str] = attrs.field(factory=list)


@attrs.frozen
class RowsRecord:
    """Rows into which conversations are packed."""

    context_length: int  # tokens of a row
    counted_tokens: int  # that count in the loss
    padding_tokens: int  # after the last conversation of a row

    def shares(self, tokens: int) -> str:
        """Describe the rows of so many tokens."""
        counted, padding = (f"{count / tokens:.2%}" for count in (self.counted_tokens, self.padding_tokens))
        return f"rows of {self.context_length:,} tokens: {counted} count in the loss, {padding} are padding"


@attrs.frozen(kw_only=True)
class Manifest:
    """Manifest of a preparation, its fields in the order of the file; older manifests lack some."""

    files: dict[str, FileEntry]  # by name
    documents: int
    tokens: int
    text_bytes: int | None = None
    tokenizer: TokenizerRecord
    sources: list[SourceRecord]
    split: SplitRecord | None = None
    units: int | None = None  # of work
    plan: str | None = None  # its fingerprint
    problems: dict[str, int] = attrs.field(factory=dict)  # how often, by kind
    lost_documents: int = 0
    lost_bytes: int = 0  # of input
    examples: dict[str, list[str]] = attrs.field(factory=dict)  # of problems, by kind
    rows: RowsRecord | None = None  # of conversations; None for text


def identity_of(fingerprint: str, structure: str | None) -> str:
    """Return the identity of a tokenizer by its fingerprint and by its ordinary added tokens.

    A fingerprint is of the ids of a few texts, in which no added token is. An added token that is not special stands
    for its text wherever it is. So two tokenizers that differ in these alone have one fingerprint. Without such tokens
    the identity is the fingerprint. `structure` is that of a record.
    """
    ordinary = ordinary_added_tokens(structure)
    return hashlib.sha256(json.dumps([fingerprint, ordinary]).encode()).hexdigest() if ordinary else fingerprint


def ordinary_added_tokens(structure: str | None) -> list[dict[str, Any]]:
    """Return the added tokens of a structure that are not special, by id, each with sorted keys. Raises ValueError."""
    added = [] if structure is None else added_tokens(structure)
    ordinary = [dict(sorted(token.items())) for token in added if not token["special"]]
    return sorted(ordinary, key=lambda token: token["id"])


def added_tokens(structure: str) -> list[dict[str, Any]]:
    """Return the added tokens of a structure.

    Raises ValueError unless it is a JSON object with a list of added tokens, each of which has at least an id, a
    content, and says whether it is special.
    """
    wanted = 'JSON text of an object whose "added_tokens" are a list of objects with id, content, special'
    try:
        values = parse_json(structure, None)
    except ValueError as error:
        raise ValueError(f"got {quoted(structure)}, wanted {wanted}: {error}") from error
    added = values.get("added_tokens") if isinstance(values, dict) else None
    if not isinstance(added, list) or not all(map(_is_added_token, added)):
        raise ValueError(f"got {quoted(structure)}, wanted {wanted}")
    return added


def _is_added_token(token: Any) -> bool:
    if not isinstance(token, dict):
        return False
    return [type(token.get(key)) for key in ("id", "content", "special")] == [int, str, bool]


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a token directory, or None without one of ours. Raises BadInput for a damaged one."""
    path = directory / MANIFEST
    with readable_tokens(path):
        if not path.exists() and not path.is_symlink():
            return None
    with refusing(f"{path}: damaged", advice(path), (OSError, ValueError)):
        manifest = parse_manifest(read_regular(path))
    if manifest is not None:
        _check_ranks(path, manifest.tokenizer)
    return manifest


def parse_manifest(data: bytes) -> Manifest | None:
    """Return the manifest in the content of a file, None for another program's. Raises ValueError for a damaged one."""
    values = parse_json(data, None)
    if not isinstance(values, dict):
        return None
    # One flipped bit spoils one key: what still has the others is ours, and damaged.
    if values.get("format") != FORMAT and not {"files", "tokenizer"} <= values.keys():
        return None
    if values.get("format") != FORMAT:
        raise ValueError(f"format: got {quoted(values.get('format'))}, wanted {FORMAT}")
    return structured(values, Manifest, unknown_keys=True)


def manifest_text(manifest: Manifest) -> str:
    values = attrs.asdict(manifest) | {"tokenizer": manifest.tokenizer.as_json()}
    if manifest.rows is None:
        del values["rows"]
    return json.dumps({"format": FORMAT, **values}, indent=2) + "\n"


def still_grows(directory: Path) -> bool:
    """Tell whether a directory's token files are still being prepared."""
    named = [directory / MANIFEST, *directory.glob("train*.safetensors")]  # the manifest may have been deleted since
    return (directory / PLAN).exists() and not any(file.exists() for file in named)


def split_of(name: str) -> str | None:
    """Return the split of which a file of this name is the whole or a shard, None for another file."""
    found = re.fullmatch(rf"({'|'.join(SPLITS)})(-\d+-of-\d+)?\.safetensors", name)
    return found and found[1]


def advice(path: Path) -> str:
    """Return advice for a manifest that is damaged, or not that of the files beside it."""
    return f"prepare or download the tokens again, or delete {path.name} to use the files as they are"


def open_listed(directory: Path, split: str, manifest: Manifest | None) -> TokenStream:
    """Open a split whose files have the manifest's names and sizes; content is not read. Raises BadInput naming one."""
    if manifest is None:
        return open_split(directory, split)
    for name in manifest.files:
        if split_of(name) == split:
            check_listed(directory / name, manifest)
    stream = open_split(directory, split)
    for file in stream.files:
        check_listed(file.path, manifest)
    return stream


def check_listed(path: Path, manifest: Manifest) -> None:
    """Raise BadInput unless a file is there, and has a manifest entry of its size."""
    with readable_tokens(path):
        got = path.stat().st_size if path.is_file() else None
    if path.name not in manifest.files:
        raise BadInput(f"{path}: not listed in {MANIFEST}; {advice(path.with_name(MANIFEST))}")
    wanted = manifest.files[path.name].size_bytes
    if got is None:
        raise BadInput(f"{path}: missing, but {MANIFEST} lists it; prepare or download it again")
    if got != wanted:
        raise BadInput(f"{path}: got {got} bytes, wanted {wanted} by {MANIFEST}; prepare or download both again")


def check_file(path: Path, manifest: Manifest) -> None:
    """Read a whole file. Raises BadInput unless it is as its manifest entry says."""
    check_listed(path, manifest)
    read_contents([read_header(path)], manifest)


def has_split(directory: Path, split: str = "train", manifest: Manifest | None = None) -> bool:
    """Return whether a directory holds, or its manifest lists, files of a split."""
    names = [path.name for path in directory.glob("*")]
    if split in map(split_of, [*names, *([] if manifest is None else manifest.files)]):
        return True
    from tokens.format.foreign_files import parse_name

    return any(parsed.split == split for parsed in map(parse_name, names) if parsed is not None)


def read_finished(directory: Path) -> Manifest | None:
    """Return the manifest of a finished preparation, None before. Raises BadInput unless its files are there."""
    manifest = read_manifest(directory)
    for split in SPLITS:
        if manifest is not None and split in map(split_of, manifest.files):
            open_listed(directory, split, manifest)
    return manifest


def read_contents(files: list[TokenFile], manifest: Manifest | None) -> dict[str, Content]:
    """Return the contents of whole files by name. Raises BadInput for one that differs from its manifest entry."""
    with ThreadPoolExecutor() as threads:  # reading and hashing leave the interpreter to other threads
        contents = dict(zip([file.path.name for file in files], threads.map(read_content, files), strict=True))
    if manifest is None:
        return contents
    for path in [file.path for file in files]:
        content, wanted, where = contents[path.name], manifest.files[path.name], path.with_name(MANIFEST)
        check_sha256(path, content.sha256, wanted.sha256)
        if content.max_id != wanted.max_id:
            raise BadInput(f"{where}: damaged: its max_id of {path.name} is not {content.max_id}; {advice(where)}")
    return contents


def read_content(file: TokenFile) -> Content:
    """Read a whole token file; return its content. Raises BadInput when it cannot be read, or for a wrong weight."""
    digest, largest, heaviest, left = hashlib.sha256(), 0, 0, file.length * file.dtype.itemsize  # bytes of tokens
    unreadable = refusing(f"{file.path}: cannot be read", "prepare or download it again", (OSError,))
    with unreadable, file.path.open("rb") as opened:
        digest.update(opened.read(file.offset_bytes))
        while data := opened.read(BLOCK_BYTES):
            digest.update(data)
            ids, weights = data[:left], data[left:]
            largest = max(largest, int(np.frombuffer(ids, file.dtype).max(initial=0)))
            heaviest = max(heaviest, int(np.frombuffer(weights, WEIGHT).max(initial=0)))
            left -= len(ids)
        size = opened.tell()
    if heaviest > 1:
        raise BadInput(f"{file.path}: damaged: got a weight of {heaviest}, wanted 0 or 1; prepare it again")
    return Content(size_bytes=size, sha256=digest.hexdigest(), max_id=largest)


def check_sha256(where: object, got: str, wanted: str) -> None:
    """Raise BadInput unless a file has the sha256 of the manifest."""
    if got != wanted:
        raise BadInput(f"{where}: damaged: got sha256 {got[:12]}, wanted {wanted[:12]}; prepare or download it again")


def _check_ranks(path: Path, tokenizer: TokenizerRecord) -> None:
    """Raise BadInput unless the byte-pair ranks that a manifest names are beside it."""
    name, wanted = tokenizer.ranks_file, tokenizer.ranks_sha256
    if name is None:
        return
    if name != RANKS_FILE:  # every reader opens that one
        raise BadInput(f"{path}: tokenizer: ranks_file: got {quoted(name)}, wanted '{RANKS_FILE}'; {advice(path)}")
    ranks = path.parent / name
    if not ranks.is_file():
        raise BadInput(f"{ranks}: missing, but {MANIFEST} names it; {advice(path)}")
    with readable_tokens(ranks):
        check_sha256(ranks, got := sha256(ranks), got if wanted is None else wanted)
