"""Progress bar of a preparation, and the final report: which tokens were written, and how much text was left out."""

import functools
import itertools
import sys
import time
from typing import Any

from tqdm import tqdm

from common.errors import BadInput
from common.output import progress, show
from common.text import counted
from tokens.documents.document_sample import DocumentSample
from tokens.documents.reader import WRONG_ENCODING
from tokens.format.manifest import Manifest, split_of
from tokens.prepare.command import PrepareCommand
from tokens.prepare.commit_log import Totals
from tokens.prepare.plan import UnitPlan

BAD_SHARE = 0.01  # share of the documents, or of the input's bytes, that may be lost
# Problems that are never acceptable -> the words that follow their number in a message
UNACCEPTABLE = {
    "damaged file": "or more in damaged files",
    WRONG_ENCODING: "not in UTF-8",
}


class UnitProgress:
    """Progress on stderr: in a terminal a bar over the bytes of the sources, otherwise a line every few seconds."""

    LINE_SECONDS = 10.0

    def __init__(self, plan: UnitPlan, totals: Totals) -> None:
        """`totals` are the sums over the units that earlier commands have committed."""
        self._started_at = self._shown = time.monotonic()
        # Bytes of input before each unit, followed by the total
        self._edges = [*itertools.accumulate(plan.unit_bytes, initial=0)]
        self._first_tokens = sum(totals.tokens.values())
        scale: dict[str, Any] = {"total": self._edges[-1], "initial": self._edges[totals.units], "unit": "B"}
        self._line = functools.partial(tqdm.format_meter, **scale, unit_scale=True)
        self._bar = tqdm(**scale, unit_scale=True, disable=not sys.stderr.isatty())
        self.show(totals)

    def show(self, totals: Totals) -> None:
        now, tokens, done_bytes = time.monotonic(), sum(totals.tokens.values()), self._edges[totals.units]
        speed = (tokens - self._first_tokens) / max(now - self._started_at, 1e-9)
        rates = f"{totals.units:,} of {len(self._edges) - 1:,} units, {tokens:,} tokens, {speed:,.0f} tokens/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(done_bytes - self._bar.n)
        if self._bar.disable and now - self._shown >= self.LINE_SECONDS:
            self._shown = now
            show(progress(self._line(n=done_bytes, elapsed=now - self._started_at, postfix=rates)))

    def close(self) -> None:
        self._bar.close()


def report(command: PrepareCommand, manifest: Manifest, seconds: float) -> None:
    """Print what was written and what was left out."""
    noun = "document" if manifest.rows is None else "conversation"
    contents = counted(manifest.documents, noun)
    show(f"{command.output}: {contents}, {counted(manifest.tokens, 'token')} in {seconds:.1f} s")
    tokens: dict[str, list[int]] = {}  # tokens of each file, by split
    for name, entry in manifest.files.items():
        tokens.setdefault(str(split_of(name)), []).append(entry.tokens)
    for split, counts in tokens.items():
        files = f"{split}.safetensors" if len(counts) == 1 else f"{split} in {len(counts):,} files"
        show(f"  {files}: {counted(sum(counts), 'token')} ({sum(counts) / manifest.tokens:.2%})")
    if manifest.rows is not None:
        show(f"  {manifest.rows.shares(manifest.tokens)}")
    report_problems(manifest, "more examples are in ledger.jsonl")


def report_problems(outcome: Manifest | DocumentSample, more_examples: str) -> None:
    """Print the number of problems of each kind, the losses, and examples.

    `more_examples` is the line to print if not all examples are shown.
    """
    if not outcome.problems:
        return
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(outcome.problems.items()))
    losses = f"{counted(outcome.lost_documents, 'document')} and {outcome.lost_bytes:,} bytes of input"
    show(progress(f"bad documents: {kinds}; {losses} are left out" + ":" * any(outcome.examples.values())))
    for line in itertools.chain.from_iterable(outcome.examples.values()):
        show(progress(f"  {line}"))
    if any(len(lines) < outcome.problems[kind] for kind, lines in outcome.examples.items()):
        show(progress(f"  {more_examples}"))


def refuse_losses(outcome: Manifest | DocumentSample, size_bytes: int, subject: str) -> None:
    """Raise BadInput if too much of the input was lost. `size_bytes` is the size of the input.

    The output exists anyway, and the message says so. If `subject` is "the token files are", the message ends with "the
    token files are complete without it".
    """
    documents = outcome.documents + outcome.lost_documents
    unacceptable = [
        f"{counted(outcome.problems[kind], 'document')} {text}"
        for kind, text in UNACCEPTABLE.items()
        if kind in outcome.problems
    ]
    loss = " and ".join(unacceptable) or f"more than {BAD_SHARE:.0%} of the input"
    if unacceptable or outcome.lost_documents > BAD_SHARE * documents or outcome.lost_bytes > BAD_SHARE * size_bytes:
        raise BadInput(f"{loss} could not be read; {subject} complete without it")
