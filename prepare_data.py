#!/usr/bin/env python3
"""Turn documents into token files: `python prepare_data.py SOURCE... --output DIR`."""

import argparse
import sys
import time
from pathlib import Path

from errors import EXIT_DONE, EXIT_ERROR, BadInput

EPILOG = """sources:
  FILE, FOLDER or 'GLOB'   .txt .md .py (a file is a document), .jsonl (.gz, .zst), .parquet
  hf:OWNER/NAME[:CONFIG]   the train split of a Hugging Face dataset, streamed
  stdlib                   the running Python's own library sources: real text that is on every machine

examples:
  python prepare_data.py stdlib --output token_files/quickstart --tokenizer bytes
  python prepare_data.py hf:HuggingFaceFW/fineweb:sample-10BT --output token_files/fineweb-10b

Exit status: 0 done, 1 error, 2 usage, 130 interrupted. Nothing is ever left half-written under a final name.
"""

EXIT_INTERRUPTED = 130
SURPRISING_SHARE = 3.0  # times what was asked for


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description="Write train, validation and test token files and their manifest, in constant memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory without token files yet")
    parser.add_argument("--tokenizer", default="gpt2", metavar="gpt2|bytes|FILE.tiktoken", help="default: gpt2")
    parser.add_argument("--text-field", default="text", metavar="NAME", help="field of records (default: text)")
    parser.add_argument(
        "--validation-fraction", type=fraction, default=0.01, metavar="F", help="of the documents, the last (0.01)"
    )
    parser.add_argument("--test-fraction", type=fraction, default=0.0, metavar="F", help="likewise, after them (0)")
    arguments = parser.parse_args()
    if arguments.validation_fraction + arguments.test_fraction >= 1:
        parser.error("--validation-fraction and --test-fraction: wanted a sum below 1, something to train on")
    return arguments


def fraction(text: str) -> float:
    """Return a number from 0 up to but not including 1, for argparse."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted 0 <= F < 1")
    return value


def main() -> int:
    """Run the command; return its exit status."""
    arguments = parse_arguments()
    try:
        prepare(arguments)
    except BadInput as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return EXIT_ERROR
    except OSError as error:  # a full disk, above all
        print(f"prepare_data.py: {arguments.output}: cannot be written: {error}; nothing was left", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("prepare_data.py: interrupted; nothing was written under a final name", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def prepare(arguments: argparse.Namespace) -> None:
    """Read, encode and write every document, in the order of the sources."""
    from tokens.documents import read_documents, resolve_sources
    from tokens.tokenizer import load_tokenizer
    from tokens.writer import Fractions, TokenWriter

    sources = resolve_sources(arguments.sources)
    tokenizer = load_tokenizer(arguments.tokenizer)
    began = time.monotonic()
    with TokenWriter(arguments.output, tokenizer) as writer:
        display = Display(sum(source.size_bytes for source in sources))
        for piece in read_documents(sources, arguments.text_field):
            writer.add(tokenizer.encode(piece.text), piece.ends_document)
            display.show(piece.position, writer.documents, writer.tokens)
        display.close()
        entries = [{"name": source.name, "files": len(source.files), "bytes": source.size_bytes} for source in sources]
        manifest = writer.finish(Fractions(arguments.validation_fraction, arguments.test_fraction), entries)
    seconds = time.monotonic() - began
    print(f"{arguments.output}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens in {seconds:.1f} s")
    for name, entry in manifest["files"].items():
        print(f"  {name}: {entry['tokens']:,} tokens ({entry['tokens'] / manifest['tokens']:.2%})")
    held_out = 1 - manifest["files"]["train.safetensors"]["tokens"] / manifest["tokens"]
    asked = arguments.validation_fraction + arguments.test_fraction
    if held_out > SURPRISING_SHARE * asked:
        print(f"NOTE: {held_out:.0%} are held out for {asked:.0%} asked: whole documents, and the last ones are long")


class Display:
    """A bar over the bytes of the sources in a terminal, a line every few seconds elsewhere, on stderr."""

    REFRESH_SECONDS = 0.2
    LINE_SECONDS = 10.0

    def __init__(self, total_bytes: int):
        from tqdm import tqdm

        self._began = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total_bytes or None, unit="B", unit_scale=True, disable=not self._terminal)

    def show(self, position: int, documents: int, tokens: int) -> None:
        """Show how far reading has come."""
        now = time.monotonic()
        if now - self._shown < (self.REFRESH_SECONDS if self._terminal else self.LINE_SECONDS):
            return
        self._shown = now
        seconds = now - self._began
        rates = f"{documents / seconds:,.0f} documents/s, {tokens / seconds:,.0f} tokens/s"
        if self._terminal:
            self._bar.set_postfix_str(rates, refresh=False)
            self._bar.update(position - self._bar.n)
        else:
            share = f"{position / self._bar.total:.0%}, " if self._bar.total else ""
            remaining = f", ETA {seconds * (self._bar.total / position - 1):.0f} s" if share and position else ""
            print(f"{share}{documents:,} documents, {rates}{remaining}", file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


if __name__ == "__main__":
    sys.exit(main())
