"""Manifest of a token directory: which files were prepared, with which tokenizer, from which sources.

The manifest is optional: a directory that contains only token files can be loaded. If there is a manifest, it must list
every file that is read, and the content of these files must not have changed.
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
RANKS_FILE = "tokenizer.tiktoken"  # copy of the byte-pair ranks, next to the token files
PLAN = "plan.json"  # plan of the preparation; written when the preparation starts
FORMAT = 1
# Fields that must be equal in the record of a tokenizer and in the record of its extension
SAME_IN_EXTENSIONS = ("end_of_text_id", "pattern", "structure", "characters")


@attrs.frozen(kw_only=True)
class Content:
    """Identity of a token file's content."""

    size_bytes: int
    sha256: str  # of the whole file
    max_id: int  # largest token id; 0 if the file has no tokens


@attrs.frozen(kw_only=True)
class FileEntry(Content):
    """The manifest's entry for a token file."""

    tokens: int
    dtype: str  # numpy's name for the type


def _check_structure(_: Any, attribute: "attrs.Attribute[str | None]", value: str | None) -> None:
    """Raise ValueError if a tokenizer has a structure, but the added tokens in it cannot be read."""
    if value is not None:
        try:
            added_tokens(value)
        except ValueError as error:
            raise ValueError(f"{attribute.name}: {error}") from error


@attrs.frozen(kw_only=True)
class TokenizerRecord:
    """The tokenizer that made the token files."""

    name: str
    vocabulary_size: int
    end_of_text_id: int
    fingerprint: str | None = None  # see tokens.tokenizer.tokenizer.fingerprint; None in older manifests
    ranks_file: str | None  # file of byte-pair ranks, next to the manifest
    ranks_sha256: str | None = None  # None in older manifests
    characters: str | None = None  # characters of a character tokenizer, in the order of their ids
    pattern: str | None = None  # regular expression of the splitting step before byte-pair encoding; None for GPT-2
    # JSON with the normalizer, pre_tokenizer and added_tokens of tokenizer.json, if a splitting pattern is not enough
    structure: str | None = attrs.field(default=None, validator=_check_structure)
    special_tokens: dict[str, int] | None = attrs.field(default=None, hash=False)  # None: only the end of text
    template: str | None = None  # Jinja template of conversations; None for plain text

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON, without optional fields that are None."""
        return attrs.asdict(self, filter=lambda field, value: value is not None or field.default is attrs.NOTHING)

    @property
    def all_special_tokens(self) -> dict[str, int]:
        """The special tokens, including the end of text."""
        return self.special_tokens or {"<|endoftext|>": self.end_of_text_id}

    @property
    def identity(self) -> str | None:
        """Identity of the ids that this tokenizer gives to texts (see `identity_of`); None in older manifests."""
        return None if self.fingerprint is None else identity_of(self.fingerprint, self.structure)

    def extends(self, base: "TokenizerRecord") -> bool:
        """Return whether every id of a base tokenizer means the same in this tokenizer.

        This tokenizer may have more special tokens, whose ids follow the ids of the base.
        """
        base_tokens, extended_tokens = base.all_special_tokens, self.all_special_tokens
        added_names = extended_tokens.keys() - base_tokens.keys()
        added_ids = {extended_tokens[name] for name in added_names}
        return (
            base_tokens.items() <= extended_tokens.items()
            and added_ids == {*range(base.vocabulary_size, self.vocabulary_size)}
            and all(getattr(self, key) == getattr(base, key) for key in SAME_IN_EXTENSIONS)
            and len({self.fingerprint, base.fingerprint} - {None}) < 2
        )


@attrs.frozen(kw_only=True)
class SourceRecord:
    """One source of documents."""

    name: str
    files: int
    bytes: int


@attrs.frozen(kw_only=True)
class SplitRecord:
    """The rule by which a preparation assigned documents to splits."""

    kind: str
    seed: int
    # Splits that received the last documents because the hashes selected no documents, or too few, for them.
    from_tail: list[str] = attrs.field(factory=list)
    # Splits whose last documents were moved to the end of train because the hashes selected too many documents.
    shortened: list[str] = attrs.field(factory=list)


@attrs.frozen
class RowsRecord:
    """The rows into which conversations are packed."""

    context_length: int  # tokens of a row
    counted_tokens: int  # tokens that add to the loss
    padding_tokens: int  # tokens after the last conversation of a row

    def shares(self, tokens: int) -> str:
        """Describe the rows of a stream with `tokens` tokens."""
        counted, padding = (f"{count / tokens:.2%}" for count in (self.counted_tokens, self.padding_tokens))
        return f"rows of {self.context_length:,} tokens: {counted} count in the loss, {padding} are padding"


@attrs.frozen(kw_only=True)
class Manifest:
    """The manifest of a preparation. Fields are in the order of the file; older manifests do not have all of them."""

    files: dict[str, FileEntry]  # by name
    documents: int
    tokens: int
    text_bytes: int | None = None
    tokenizer: TokenizerRecord
    sources: list[SourceRecord]
    split: SplitRecord | None = None
    units: int | None = None  # units of work
    plan: str | None = None  # fingerprint of the plan
    problems: dict[str, int] = attrs.field(factory=dict)  # number of documents with a problem, by kind
    lost_documents: int = 0
    lost_bytes: int = 0  # bytes of input
    examples: dict[str, list[str]] = attrs.field(factory=dict)  # examples of problems, by kind
    rows: RowsRecord | None = None  # the rows if the tokens are conversations; None for text


def identity_of(fingerprint: str, structure: str | None) -> str:
    """Return the identity of a tokenizer, computed from its fingerprint and its ordinary added tokens.

    The fingerprint covers the ids of a few texts, and no added token occurs in these texts. An added token that is not
    special replaces its text wherever that text occurs, so two tokenizers can differ in such tokens and still have the
    same fingerprint. If a tokenizer has no such tokens, its identity is its fingerprint. The argument `structure` comes
    from a `TokenizerRecord`.
    """
    ordinary = ordinary_added_tokens(structure)
    return hashlib.sha256(json.dumps([fingerprint, ordinary]).encode()).hexdigest() if ordinary else fingerprint


def ordinary_added_tokens(structure: str | None) -> list[dict[str, Any]]:
    """Return the added tokens of a structure that are not special.

    The tokens are sorted by id, and the keys of each token are sorted alphabetically. Raises ValueError if the
    structure cannot be read.
    """
    added = [] if structure is None else added_tokens(structure)
    ordinary = [dict(sorted(token.items())) for token in added if not token["special"]]
    return sorted(ordinary, key=lambda token: token["id"])


def added_tokens(structure: str) -> list[dict[str, Any]]:
    """Return the added tokens of a structure.

    Raises ValueError unless the structure is a JSON object with a list of added tokens, each with at least an id,
    a text ("content") and a flag that says whether the token is special.
    """
    expected = 'the JSON text of an object whose "added_tokens" is a list of objects with id, content and special'
    try:
        values = parse_json(structure, None)
    except ValueError as error:
        raise ValueError(f"got {quoted(structure)}, wanted {expected}: {error}") from error
    added = values.get("added_tokens") if isinstance(values, dict) else None
    if not isinstance(added, list) or not all(map(_is_added_token, added)):
        raise ValueError(f"got {quoted(structure)}, wanted {expected}")
    return added


def _is_added_token(token: Any) -> bool:
    if not isinstance(token, dict):
        return False
    return [type(token.get(key)) for key in ("id", "content", "special")] == [int, str, bool]


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a token directory.

    Returns None if there is no manifest, or if another program wrote it. Raises BadInput if the manifest is damaged.
    """
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
    """Parse the content of a manifest file. Return None if another program wrote the file.

    Raises ValueError if the manifest is damaged.
    """
    values = parse_json(data, None)
    if not isinstance(values, dict):
        return None
    # A flipped bit spoils only one key, so a file that still has the other keys is ours, but damaged.
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
    """Return whether the token files in a directory are still being prepared."""
    final_files = [directory / MANIFEST, *directory.glob("train*.safetensors")]  # the manifest may have been deleted
    return (directory / PLAN).exists() and not any(file.exists() for file in final_files)


def split_of(name: str) -> str | None:
    """Return the split of a file, judging by its name. Return None if it is neither a whole split nor a shard."""
    match = re.fullmatch(rf"({'|'.join(SPLITS)})(-\d+-of-\d+)?\.safetensors", name)
    return match and match[1]


def advice(path: Path) -> str:
    """Return advice for a manifest that is damaged, or that does not match the files next to it."""
    return f"prepare or download the tokens again, or delete {path.name} to use the files as they are"


def open_listed(directory: Path, split: str, manifest: Manifest | None) -> TokenStream:
    """Open a split and check that its files have the names and sizes in the manifest, without reading them.

    Raises BadInput for the first file that differs.
    """
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
    """Raise BadInput unless a file exists, and is in the manifest with the same size."""
    with readable_tokens(path):
        size = path.stat().st_size if path.is_file() else None
    if path.name not in manifest.files:
        raise BadInput(f"{path}: not listed in {MANIFEST}; {advice(path.with_name(MANIFEST))}")
    expected_size = manifest.files[path.name].size_bytes
    if size is None:
        raise BadInput(f"{path}: missing, but {MANIFEST} lists it; prepare or download it again")
    if size != expected_size:
        raise BadInput(
            f"{path}: got {size} bytes, wanted {expected_size} as {MANIFEST} says; prepare or download both files again"
        )


def check_file(path: Path, manifest: Manifest) -> None:
    """Read a complete file, and raise BadInput unless it matches its manifest entry."""
    check_listed(path, manifest)
    read_contents([read_header(path)], manifest)


def has_split(directory: Path, split: str = "train", manifest: Manifest | None = None) -> bool:
    """Return whether a directory contains files of a split, or whether its manifest lists such files."""
    names = [path.name for path in directory.glob("*")]
    if split in map(split_of, [*names, *([] if manifest is None else manifest.files)]):
        return True
    from tokens.format.foreign_files import parse_name

    return any(parsed.split == split for parsed in map(parse_name, names) if parsed is not None)


def read_finished(directory: Path) -> Manifest | None:
    """Return the manifest of a finished preparation, or None if it is not finished.

    Raises BadInput if a file that the manifest lists is missing.
    """
    manifest = read_manifest(directory)
    for split in SPLITS:
        if manifest is not None and split in map(split_of, manifest.files):
            open_listed(directory, split, manifest)
    return manifest


def read_contents(files: list[TokenFile], manifest: Manifest | None) -> dict[str, Content]:
    """Read complete files, and return a dict from the name of each file to its `Content`.

    Raises BadInput if a file differs from its manifest entry.
    """
    with ThreadPoolExecutor() as threads:  # reading and hashing release Python's global lock
        contents = dict(zip([file.path.name for file in files], threads.map(read_content, files), strict=True))
    if manifest is None:
        return contents
    for path in [file.path for file in files]:
        content, entry, where = contents[path.name], manifest.files[path.name], path.with_name(MANIFEST)
        check_sha256(path, content.sha256, entry.sha256)
        if content.max_id != entry.max_id:
            raise BadInput(f"{where}: damaged: its max_id for {path.name} should be {content.max_id}; {advice(where)}")
    return contents


def read_content(file: TokenFile) -> Content:
    """Read a complete token file and return its `Content`.

    Raises BadInput if the file cannot be read, or if one of its weights is neither 0 nor 1.
    """
    digest, largest_id, largest_weight = hashlib.sha256(), 0, 0
    token_bytes_left = file.length * file.dtype.itemsize
    unreadable = refusing(f"{file.path}: cannot be read", "prepare or download it again", (OSError,))
    with unreadable, file.path.open("rb") as opened:
        digest.update(opened.read(file.offset_bytes))
        while data := opened.read(BLOCK_BYTES):
            digest.update(data)
            ids, weights = data[:token_bytes_left], data[token_bytes_left:]
            largest_id = max(largest_id, int(np.frombuffer(ids, file.dtype).max(initial=0)))
            largest_weight = max(largest_weight, int(np.frombuffer(weights, WEIGHT).max(initial=0)))
            token_bytes_left -= len(ids)
        size = opened.tell()
    if largest_weight > 1:
        raise BadInput(f"{file.path}: damaged: got a weight of {largest_weight}, wanted 0 or 1; prepare it again")
    return Content(size_bytes=size, sha256=digest.hexdigest(), max_id=largest_id)


def check_sha256(where: object, got: str, expected: str) -> None:
    """Raise BadInput unless a file has the sha256 that the manifest states."""
    if got != expected:
        raise BadInput(f"{where}: damaged: got sha256 {got[:12]}, wanted {expected[:12]}; prepare or download it again")


def _check_ranks(path: Path, tokenizer: TokenizerRecord) -> None:
    """Raise BadInput unless the file of ranks that a manifest names is next to the manifest and undamaged."""
    name, expected_sha256 = tokenizer.ranks_file, tokenizer.ranks_sha256
    if name is None:
        return
    if name != RANKS_FILE:  # every reader opens the file by this name
        raise BadInput(f"{path}: tokenizer: ranks_file: got {quoted(name)}, wanted '{RANKS_FILE}'; {advice(path)}")
    ranks = path.parent / name
    if not ranks.is_file():
        raise BadInput(f"{ranks}: missing, but {MANIFEST} names it; {advice(path)}")
    with readable_tokens(ranks):
        check_sha256(ranks, got := sha256(ranks), got if expected_sha256 is None else expected_sha256)
