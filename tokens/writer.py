"""Documents to token files: constant memory, nothing under a final name until all of it is on disk.

All tokens are appended to one partial file while a second one notes where each document ends; at the end the tail
becomes validation and test, headers are filled in and the files get their names, the manifest last. Reading and
encoding happen before `add`: a parallel preparation hands its tokens over in the same order.
"""

import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import attrs
import numpy as np

from errors import BadInput
from files import sync
from tokens.manifest import FORMAT, MANIFEST, read_content
from tokens.token_file import HEADER_BYTES, read_header, write_header
from tokens.tokenizer import RANKS_FILE, Tokenizer, token_dtype

PARTIAL = ".partial-"
COPY_BYTES = 1 << 24


@attrs.frozen
class Fractions:
    """Shares of the documents that are held out, from the end: train | validation | test."""

    validation: float
    test: float


class TokenWriter:
    """Collects tokens into DIR. Use as a context manager: leaving it by an exception removes what was written."""

    def __init__(self, directory: Path, tokenizer: Tokenizer):
        self.directory = directory
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.vocabulary_size).newbyteorder("<")
        self.documents = 0
        self.tokens = 0
        self._end_of_text = np.array([tokenizer.end_of_text_id], self.dtype)

    def __enter__(self) -> "TokenWriter":
        taken = [*self.directory.glob("[!.]*.safetensors"), *self.directory.glob(MANIFEST)]
        if taken:
            raise BadInput(f"{taken[0]}: exists; pass another --output, or delete it to prepare these tokens anew")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_partial_files()  # left by a run that was killed
        self._stream = self._partial("train.safetensors").open("w+b")
        self._stream.write(bytes(HEADER_BYTES))
        self._ends = self._partial("document-ends").open("w+b")  # int64 positions
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._ends.close()
        self._remove_partial_files()

    def add(self, ids: np.ndarray, ends_document: bool) -> None:
        """Append the tokens of a document or of a piece of one, 1-D; the end-of-text id follows its last piece."""
        self._stream.write(ids.astype(self.dtype, copy=False).data)
        self.tokens += len(ids)
        if ends_document:
            self._stream.write(self._end_of_text.data)
            self.tokens += 1
            self.documents += 1
            self._ends.write(np.array([self.tokens], np.int64).data)

    def finish(self, fractions: Fractions, sources: list[dict[str, Any]]) -> dict[str, Any]:
        """Cut the splits, write headers and manifest, give the files their names; return the manifest."""
        if self.documents == 0:
            raise BadInput("the sources hold no document; nothing was written")
        validation, test = self._cuts(fractions)
        lengths = {"test": self.tokens - test, "validation": test - validation, "train": validation}
        self._ends.close()
        for split, start in (("test", test), ("validation", validation)):  # from the end: each shortens the stream
            if lengths[split]:
                self._split_off(split, start, lengths[split])
        self._fill_header(self._stream, lengths["train"])
        self._stream.close()
        manifest = self._manifest(lengths, sources)
        self._partial(MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        sync(self._partial(MANIFEST))
        if self.tokenizer.ranks_file is not None:
            shutil.copyfile(self.tokenizer.ranks_file, self.directory / RANKS_FILE)
            sync(self.directory / RANKS_FILE)
        self._give_names([*reversed(manifest["files"]), MANIFEST])
        return manifest

    def _give_names(self, names: list[str]) -> None:
        """Rename the partial files, the manifest last; an interruption takes the names back."""
        try:
            for name in names:
                self._partial(name).replace(self.directory / name)
            sync(self.directory)
        except BaseException:
            for name in names:
                (self.directory / name).unlink(missing_ok=True)
            raise

    def _cuts(self, fractions: Fractions) -> tuple[int, int]:
        """Return the token positions where validation and test begin."""
        if self.documents == 1:
            held_out = [_share(self.tokens, fraction) for fraction in (fractions.validation, fractions.test)]
            if sum(held_out) >= self.tokens:
                raise BadInput(
                    f"a lone document of {self.tokens} tokens is too short to hold out {sum(held_out)} of them"
                )
            return self.tokens - sum(held_out), self.tokens - held_out[1]
        held_out = [_share(self.documents, fraction) for fraction in (fractions.validation, fractions.test)]
        if sum(held_out) >= self.documents:
            raise BadInput(
                f"{self.documents} documents are too few to hold out {held_out[0]} for validation and {held_out[1]} "
                "for test; add documents or lower the fractions"
            )
        return self._end_of(self.documents - sum(held_out)), self._end_of(self.documents - held_out[1])

    def _end_of(self, document_count: int) -> int:
        """Return the position after the first `document_count` documents."""
        self._ends.seek(8 * (document_count - 1))
        return int(np.frombuffer(self._ends.read(8), np.int64)[0])

    def _split_off(self, split: str, start: int, length: int) -> None:
        """Move the stream's tokens from `start` to its end into the split's own partial file."""
        begin = HEADER_BYTES + start * self.dtype.itemsize
        with self._partial(f"{split}.safetensors").open("w+b") as file:
            file.seek(HEADER_BYTES)
            self._stream.seek(begin)
            shutil.copyfileobj(self._stream, file, COPY_BYTES)
            self._fill_header(file, length)
        self._stream.truncate(begin)

    def _fill_header(self, file: BinaryIO, length: int) -> None:
        write_header(file, self.dtype, length)
        file.flush()
        sync(Path(file.name))

    def _manifest(self, lengths: dict[str, int], sources: list[dict[str, Any]]) -> dict[str, Any]:
        files = {
            f"{split}.safetensors": _describe(self._partial(f"{split}.safetensors"))
            for split in ("train", "validation", "test")
            if lengths[split] or split == "train"
        }
        return {
            "format": FORMAT,
            "files": files,
            "documents": self.documents,
            "tokens": self.tokens,
            "tokenizer": {
                "name": self.tokenizer.name,
                "vocabulary_size": self.tokenizer.vocabulary_size,
                "end_of_text_id": self.tokenizer.end_of_text_id,
                "ranks_file": RANKS_FILE if self.tokenizer.ranks_file else None,
            },
            "sources": sources,
        }

    def _partial(self, name: str) -> Path:
        return self.directory / f"{PARTIAL}{name}"

    def _remove_partial_files(self) -> None:
        for path in self.directory.glob(f"{PARTIAL}*"):
            path.unlink()


def _share(count: int, fraction: float) -> int:
    """Return the held-out share of a count: at least one where anything is asked for."""
    return max(1, round(count * fraction)) if fraction > 0 else 0


def _describe(path: Path) -> dict[str, Any]:
    """Return the manifest's entry of a finished token file, read back from disk."""
    file = read_header(path)
    return {**attrs.asdict(read_content(file)), "tokens": file.length, "dtype": file.dtype.name}
