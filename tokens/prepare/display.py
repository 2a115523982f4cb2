"""What people see of a preparation: a bar while it runs, and at the end what was written and what was not."""

import itertools
import sys
import time
from typing import Any

from common.errors import printable
from tokens.prepare.prepare import PrepareProgress

SURPRISING_SHARE = 3.0  # times what was asked for
BAD_SHARE = 0.01  # of documents, or of the input's bytes, that may be lost


class Display:
    """A bar over the bytes of the sources in a terminal, a line every few seconds elsewhere, on stderr."""

    LINE_SECONDS = 10.0

    def __init__(self) -> None:
        self._began = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._first: tuple[int, int] | None = None  # tokens and bytes that were there when measuring began

    def show(self, progress: PrepareProgress) -> None:
        """Show how far it has come."""
        now = time.monotonic()
        totals, tokens = progress.totals, sum(progress.totals.tokens.values())
        if self._first is None:  # what an earlier command did is no measure
            self._began, self._first = now, (tokens, progress.done_bytes)
            if self._terminal:
                from tqdm import tqdm

                self._bar = tqdm(total=progress.total_bytes, unit="B", unit_scale=True, initial=progress.done_bytes)
        if not self._terminal and now - self._shown < self.LINE_SECONDS:
            return
        self._shown = now
        seconds = max(now - self._began, 1e-9)
        new_tokens, new_bytes = tokens - self._first[0], progress.done_bytes - self._first[1]
        rates = f"{totals.units:,} of {progress.units:,} units, {tokens:,} tokens, {new_tokens / seconds:,.0f} tokens/s"
        if self._terminal:
            self._bar.set_postfix_str(rates, refresh=False)
            self._bar.update(progress.done_bytes - self._bar.n)
        else:
            left = seconds * (progress.total_bytes - progress.done_bytes) / new_bytes if new_bytes else None
            eta = "" if left is None else f", ETA {left:.0f} s"
            print(f"{progress.done_bytes / max(1, progress.total_bytes):.0%}, {rates}{eta}", file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def report(output: str, manifest: dict[str, Any], asked: float, seconds: float) -> None:
    """Print what was written, and what was not. `asked`: the share of the documents that was to be held out."""
    print(f"{printable(output)}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens in {seconds:.1f} s")
    tokens: dict[str, int] = {}  # by split; of their files, which may be thousands
    files: dict[str, int] = {}
    for name, entry in manifest["files"].items():
        split = name.partition(".")[0].partition("-")[0]
        tokens[split] = tokens.get(split, 0) + entry["tokens"]
        files[split] = files.get(split, 0) + 1
    for split, count in tokens.items():
        what = f"{split}.safetensors" if files[split] == 1 else f"{split} in {files[split]:,} files"
        print(f"  {what}: {count:,} tokens ({count / manifest['tokens']:.2%})")
    held_out = 1 - tokens["train"] / manifest["tokens"]
    if held_out > SURPRISING_SHARE * asked:
        print(f"NOTE: {held_out:.0%} are held out for {asked:.0%} asked: whole documents, and some of them are long")
    if manifest["problems"]:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(manifest["problems"].items()))
        print(
            f"bad documents: {kinds}; {manifest['lost_documents']:,} documents and {manifest['lost_bytes']:,} bytes of "
            "input are left out:",
            file=sys.stderr,
        )
        for line in itertools.chain.from_iterable(manifest["examples"].values()):
            print(f"  {printable(line)}", file=sys.stderr)
        if any(len(lines) < manifest["problems"][kind] for kind, lines in manifest["examples"].items()):
            print("  ledger.jsonl names more", file=sys.stderr)


def too_many_bad(manifest: dict[str, Any]) -> bool:
    """Tell whether more was lost than may be passed over."""
    documents = manifest["documents"] + manifest["lost_documents"]
    size = sum(source["bytes"] for source in manifest["sources"])
    damaged = manifest["problems"].get("damaged file")  # nobody knows what was in it
    too_many = manifest["lost_documents"] > BAD_SHARE * documents or manifest["lost_bytes"] > BAD_SHARE * size
    what = f"{damaged:,} documents or more in damaged files" if damaged else f"more than {BAD_SHARE:.0%} of the input"
    if damaged or too_many:
        print(f"prepare_data.py: {what} could not be read; the token files are complete without", file=sys.stderr)
    return bool(damaged or too_many)
