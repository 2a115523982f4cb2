"""Progress bar of a preparation, and the final report of tokens written and text left out."""

import functools
import itertools
import sys
import time
from typing import Any

from tqdm import tqdm

from common.errors import BadInput
from common.output import progress, show
from tokens.documents.document_sample import DocumentSample
from tokens.documents.reader import WRONG_ENCODING
from tokens.format.manifest import Manifest, split_of
from tokens.prepare.command import PrepareCommand
from tokens.prepare.commit_log import Totals
from tokens.prepare.plan import UnitPlan

BAD_SHARE = 0.01  # of documents, or of the input's bytes, that may be lost
# Problems of which none is acceptable, in words after their number
WHOLE = {
    "damaged file": "documents or more in damaged files",
    WRONG_ENCODING: "documents in another encoding than UTF-8",
}


class UnitProgress:
    """Progress on stderr: a bar over the bytes of the sources in a terminal, elsewhere a line every few seconds."""

    LINE_SECONDS = 10.0

    def __init__(self, plan: UnitPlan, totals: Totals) -> None:
        """`totals`: of earlier commands."""
        self._began = self._shown = time.monotonic()
        self._edges = [*itertools.accumulate(plan.unit_bytes, initial=0)]  # bytes of input before each unit, and of all
        self._first_tokens = sum(totals.tokens.values())
        scale: dict[str, Any] = {"total": self._edges[-1], "initial": self._edges[totals.units], "unit": "B"}
        self._line = functools.partial(tqdm.format_meter, **scale, unit_scale=True)
        self._bar = tqdm(**scale, unit_scale=True, disable=not sys.stderr.isatty())
        self.show(totals)

    def show(self, totals: Totals) -> None:
        now, tokens, done_bytes = time.monotonic(), sum(totals.tokens.values()), self._edges[totals.units]
        speed = (tokens - self._first_tokens) / max(now - self._began, 1e-9)
        rates = f"{totals.units:,} of {len(self._edges) - 1:,} units, {tokens:,} tokens, {speed:,.0f} tokens/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(done_bytes - self._bar.n)
        if self._bar.disable and now - self._shown >= self.LINE_SECONDS:
            self._shown = now
            show(progress(self._line(n=done_bytes, elapsed=now - self._began, postfix=rates)))

    def close(self) -> None:
        self._bar.close()


def report(command: PrepareCommand, manifest: Manifest, seconds: float) -> None:
    """Print what was written and left out."""
    what = f"{manifest.documents:,} {'documents' if manifest.rows is None else 'conversations'}"
    show(f"{command.output}: {what}, {manifest.tokens:,} tokens in {seconds:.1f} s")
    tokens: dict[str, list[int]] = {}  # of each file, by split
    for name, entry in manifest.files.items():
        tokens.setdefault(str(split_of(name)), []).append(entry.tokens)
    for split, counts in tokens.items():
        what = f"{split}.safetensors" if len(counts) == 1 else f"{split} in {len(counts):,} files"
        show(f"  {what}: {sum(counts):,} tokens ({sum(counts) / manifest.tokens:.2%})")
    if manifest.rows is not None:
        show(f"  {manifest.rows.shares(manifest.tokens)}")
    report_problems(manifest, "ledger.jsonl has more")


def report_problems(found: Manifest | DocumentSample, more: str) -> None:
    """Print the documents left out, by kind, with examples. `more`: the place of further examples."""
    if not found.problems:
        return
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(found.problems.items()))
    lost = f"{found.lost_documents:,} documents and {found.lost_bytes:,} bytes of input"
    show(progress(f"bad documents: {kinds}; {lost} are left out" + ":" * any(found.examples.values())))
    for line in itertools.chain.from_iterable(found.examples.values()):
        show(progress(f"  {line}"))
    if any(len(lines) < found.problems[kind] for kind, lines in found.examples.items()):
        show(progress(f"  {more}"))


def refuse_losses(found: Manifest | DocumentSample, size_bytes: int, made: str) -> None:
    """Raise BadInput where more of `size_bytes` of input was lost than is acceptable; `made` is complete without."""
    documents = found.documents + found.lost_documents
    whole = [f"{found.problems[kind]:,} {text}" for kind, text in WHOLE.items() if kind in found.problems]
    what = " and ".join(whole) or f"more than {BAD_SHARE:.0%} of the input"
    if whole or found.lost_documents > BAD_SHARE * documents or found.lost_bytes > BAD_SHARE * size_bytes:
        raise BadInput(f"{what} could not be read; {made} complete without")
