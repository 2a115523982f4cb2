"""Units to token files: appended in the order of the plan, durable with each commit, named when all of it is there.

Until then the files are hidden: `.partial-train.safetensors` has room for its header and then the tokens of all
committed units. A kill at any moment loses what was not committed, and nothing else.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import numpy as np

from errors import BadInput
from files import replace_file, sync
from tokens.ledger import Ledger, Totals
from tokens.manifest import MANIFEST, manifest_text, read_content
from tokens.splits import SPLITS, SplitRule
from tokens.token_file import HEADER_BYTES, read_header, write_header
from tokens.tokenizer import RANKS_FILE, Tokenizer, token_dtype
from tokens.work import Result, unit_file

PARTIAL = ".partial-"
COPY_BYTES = 1 << 24
CRASH_POINTS = (
    "tokens written",
    "ledger written",
    "unit deleted",
    "tail copied",
    "cut noted",
    "tail cut off",
    "headers written",
    "file named",
    "all named",
    "manifest written",
)  # of a commit and of the end, in order


def reached(point: str) -> None:
    """Do nothing at a moment of the work: where tests end the process."""
    assert point in CRASH_POINTS, point


class TokenWriter:
    """The growing token files of one directory."""

    def __init__(self, directory: Path, units: Path, tokenizer: Tokenizer, ledger: Ledger):
        """Continue where the ledger ends. Raises BadInput when a file is shorter than that."""
        self.directory = directory
        self._units = units
        self._tokenizer = tokenizer
        self._ledger = ledger
        self._dtype = token_dtype(tokenizer.vocabulary_size).newbyteorder("<")
        self._take_names_back()
        self._files = {split: self._open(split) for split in SPLITS}

    @property
    def totals(self) -> Totals:
        """Sums over what is committed."""
        return self._ledger.totals

    def commit(self, results: list[Result]) -> None:
        """Append units, the next ones of the plan; their tokens and the ledger are on the disk when it returns."""
        for split, file in self._files.items():
            paths = [unit_file(self._units, result.index, split) for result in results if split in result.parts]
            for path in paths:
                with path.open("rb") as unit:
                    shutil.copyfileobj(unit, file, COPY_BYTES)
            if paths:
                file.flush()
                os.fsync(file.fileno())
        reached("tokens written")
        self._ledger.append(results)
        reached("ledger written")
        for result in results:
            for split in result.parts:
                unit_file(self._units, result.index, split).unlink()
                reached("unit deleted")

    def finish(self, rule: SplitRule, description: dict[str, Any]) -> dict[str, Any]:
        """Cut off what is missing of validation and test, write headers and manifest, give the files their names.

        Returns the manifest, `description` included. Raises BadInput where a split cannot be filled.
        """
        lengths = self._ledger.cut or self._cut(rule)
        self._file("train").truncate(self._end("train", lengths["train"]))
        reached("tail cut off")
        used = [split for split in SPLITS if lengths[split]]
        for split, file in self._files.items():
            if split in used:
                write_header(file, self._dtype, lengths[split])
                file.flush()
                os.fsync(file.fileno())
            file.close()
        reached("headers written")
        contents = {split: read_content(read_header(self._path(split))) for split in used}
        totals = self._ledger.totals
        manifest = {
            "files": {
                f"{split}.safetensors": {
                    **attrs.asdict(contents[split]),
                    "tokens": lengths[split],
                    "dtype": self._dtype.name,
                }
                for split in used
            },
            "documents": sum(totals.documents.values()),
            "tokens": sum(lengths.values()),
            "text_bytes": totals.text_bytes,
            "tokenizer": {
                "name": self._tokenizer.name,
                "vocabulary_size": self._tokenizer.vocabulary_size,
                "end_of_text_id": self._tokenizer.end_of_text_id,
                "ranks_file": RANKS_FILE if self._tokenizer.ranks_file else None,
            },
            **description,
        }
        for split in SPLITS:
            if split in used:
                self._path(split).replace(self.directory / f"{split}.safetensors")
                reached("file named")
            else:
                self._path(split).unlink()
        sync(self.directory)
        reached("all named")
        replace_file(self.directory / MANIFEST, manifest_text(manifest), durable=True)
        reached("manifest written")
        return manifest

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _open(self, split: str) -> BinaryIO:
        path = self._path(split)
        if not path.exists():
            path.write_bytes(bytes(HEADER_BYTES))
        tokens = self._ledger.totals.tokens[split] if self._ledger.cut is None else self._ledger.cut[split]
        end = self._end(split, tokens)
        if path.stat().st_size < end:
            raise BadInput(
                f"{path}: got {path.stat().st_size:,} bytes, wanted at least {end:,} by {self._ledger.path.name}: "
                "it was cut or replaced; begin anew in another --output"
            )
        file = path.open("r+b")
        if self._ledger.cut is None or split != "train":  # the train stream's tail goes when all else is ready
            file.truncate(end)
        file.seek(end)
        return file

    def _take_names_back(self) -> None:
        """Hide files whose naming was cut short: without a manifest the work is not done."""
        for split in SPLITS:
            path = self.directory / f"{split}.safetensors"
            if path.exists():
                path.replace(self._path(split))

    def _cut(self, rule: SplitRule) -> dict[str, int]:
        """Copy the tail of the train stream to the splits that are wanted and empty; return all splits' lengths.

        By whole documents; a lone one is cut by tokens.
        """
        totals = self._ledger.totals
        shares = {"validation": rule.validation, "test": rule.test}
        missing = {split: share for split, share in shares.items() if share > 0 and not totals.tokens[split]}
        documents, tokens = sum(totals.documents.values()), totals.tokens["train"]
        if tokens == 0:
            raise BadInput(
                "the sources hold no document; nothing was written"
                if documents == 0
                else "every document's hash fell to a held-out split; add documents, or pass --split tail"
            )
        held_out = {split: _share(documents, share) for split, share in missing.items()}
        if documents == 1:
            held_out = {split: _share(tokens, share) for split, share in missing.items()}
            if sum(held_out.values()) >= tokens:
                raise BadInput(
                    f"a lone document of {tokens} tokens is too short to hold out {sum(held_out.values())} of them"
                )
        elif sum(held_out.values()) >= totals.documents["train"]:
            raise BadInput(
                f"{documents} documents are too few to hold out "
                f"{' and '.join(f'{count} for {split}' for split, count in held_out.items())}; add documents or lower "
                "the fractions"
            )
        lengths = dict(totals.tokens)
        end = tokens
        for split in reversed(held_out):  # the test split is the very end
            begin = end - held_out[split] if documents == 1 else self._before_documents(held_out[split], end)
            self._copy_out(split, begin, end)
            lengths[split] = end - begin
            end = begin
        lengths["train"] = end
        reached("tail copied")
        self._ledger.append_cut(lengths)
        reached("cut noted")
        return lengths

    def _before_documents(self, count: int, end: int) -> int:
        """Return where the last `count` documents of the train stream before `end` begin."""
        stop = end - 1  # the last one's own
        while stop > 0:
            begin = max(0, stop - COPY_BYTES)
            found = np.flatnonzero(self._train_tokens(begin, stop) == self._tokenizer.end_of_text_id)
            if len(found) >= count:
                return begin + int(found[-count]) + 1
            count, stop = count - len(found), begin
        raise AssertionError("more documents than end-of-text ids")

    def _train_tokens(self, begin: int, end: int) -> np.ndarray:
        return np.memmap(self._path("train"), self._dtype, mode="r", offset=HEADER_BYTES)[begin:end]

    def _copy_out(self, split: str, begin: int, end: int) -> None:
        file = self._file(split)
        file.seek(HEADER_BYTES)
        for start in range(begin, end, COPY_BYTES):
            file.write(self._train_tokens(start, min(end, start + COPY_BYTES)).tobytes())
        file.flush()
        os.fsync(file.fileno())

    def _file(self, split: str) -> BinaryIO:
        return self._files[split]

    def _end(self, split: str, tokens: int) -> int:
        return HEADER_BYTES + tokens * self._dtype.itemsize

    def _path(self, split: str) -> Path:
        return partial_file(self.directory, split)


def partial_file(directory: Path, split: str) -> Path:
    """Return where the tokens of a split are until it is finished."""
    return directory / f"{PARTIAL}{split}.safetensors"


def partial_files(directory: Path) -> Iterator[Path]:
    """Yield the hidden files of token files that are not finished."""
    return directory.glob(f"{PARTIAL}*.safetensors")


def _share(count: int, fraction: float) -> int:
    """Return the held-out share of a count: at least one where anything is asked for."""
    return max(1, round(count * fraction)) if fraction > 0 else 0
