#!/usr/bin/env python3
"""Turn documents into token files: `python prepare_data.py SOURCE... --output DIR`; and look after them."""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from errors import EXIT_DONE, EXIT_ERROR, BadInput

if TYPE_CHECKING:
    from tokens.executors import Executor
    from tokens.prepare import Progress

EPILOG = """sources:
  FILE, FOLDER or 'GLOB'   .txt .md .py (a file is a document), .jsonl .json (a line is; .gz, .zst), .parquet
  s3://... gs://... https://...   the same, wherever fsspec reads (pip install s3fs, gcsfs, aiohttp); over http a
                           folder's name ends in /; AWS_ENDPOINT_URL names an S3 server that is not Amazon's
  hf:OWNER/NAME[:CONFIG][@REVISION]   the data files of a Hugging Face dataset's train split
  stdlib                   the running Python's own library sources: real text that is on every machine

examples:
  python prepare_data.py stdlib --output token_files/quickstart --tokenizer bytes --validation-fraction 0.03
  python prepare_data.py hf:HuggingFaceFW/fineweb:sample-10BT --output token_files/fineweb-10b
  python prepare_data.py s3://BUCKET/texts --output s3://BUCKET/tokens --shard-tokens 100000000

  python prepare_data.py status DIR     how far a preparation has come; DIR may be s3://..., here and for verify
  python prepare_data.py verify DIR     whether every token is as it was written
  python prepare_data.py stats DIR      documents, their lengths (also as a chart), and duplicates
  python prepare_data.py push DIR OWNER/NAME [--private] [--license mit]     to the Hugging Face hub, as a dataset

With --output s3://... full shards leave this disk at once, with all that another machine needs to go on.
The same command goes on where an earlier one was interrupted or killed; the number of workers may change.
Exit status: 0 done; 1 error, a damaged file, or more than 1 % of the documents bad; 2 usage; 130 interrupted. Nothing
is ever left half-written under a final name.
"""

EXIT_INTERRUPTED = 130
SURPRISING_SHARE = 3.0  # times what was asked for
BAD_SHARE = 0.01  # of documents, or of the input's bytes, that may be lost
COMMANDS = ("status", "verify", "stats", "push")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description="Write train, validation and test token files and their manifest, in constant memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument(
        "--output", required=True, metavar="DIR|s3://...", help="of the token files; goes on with what is in it"
    )
    parser.add_argument("--tokenizer", default="gpt2", metavar="gpt2|bytes|FILE.tiktoken", help="default: gpt2")
    parser.add_argument("--text-field", default="text", metavar="NAME", help="field of records (default: text)")
    parser.add_argument(
        "--validation-fraction", type=fraction, default=0.01, metavar="F", help="share of the documents (0.01)"
    )
    parser.add_argument("--test-fraction", type=fraction, default=0.0, metavar="F", help="likewise (0)")
    parser.add_argument(
        "--split",
        choices=("hash", "tail"),
        default="hash",
        help="which documents are held out: by a hash of their text, or the last ones (default: hash)",
    )
    parser.add_argument("--split-seed", type=int, default=0, metavar="N", help="of the hash (0)")
    parser.add_argument("--executor", choices=("process", "inline", "ray"), default="process", help="default: process")
    parser.add_argument("--workers", type=positive, default=os.cpu_count(), metavar="N", help="processes (all cores)")
    parser.add_argument("--ray-address", metavar="ADDRESS", help="of the cluster: auto, or HOST:PORT")
    parser.add_argument("--unit-bytes", type=positive, default=1 << 24, metavar="N", help="of work, about (16777216)")
    parser.add_argument(
        "--shard-tokens", type=positive, metavar="N", help="of each file, if a split has more (one file a split)"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="of an s3:// output: shards until they are there (token_files/NAME)",
    )
    parser.add_argument(
        "--on-bad-document",
        choices=("skip", "fail"),
        default="skip",
        help="what cannot be read is counted and left out, or ends the command (default: skip)",
    )
    arguments = parser.parse_args()
    if arguments.validation_fraction + arguments.test_fraction >= 1:
        parser.error("--validation-fraction and --test-fraction: wanted a sum below 1, something to train on")
    remote = "://" in arguments.output
    if remote and not arguments.output.startswith("s3://"):
        parser.error(f"--output {arguments.output}: wanted a folder, or s3://BUCKET/PREFIX")
    if remote and arguments.shard_tokens is None:
        parser.error("--output s3://...: wanted --shard-tokens N, so that finished shards can leave this disk")
    if remote and arguments.split == "tail":
        parser.error("--output s3://...: wanted --split hash; the tail would be cut out of shards that have left")
    if arguments.scratch is not None and not remote:
        parser.error("--scratch: only for an s3:// output")
    return arguments


def fraction(text: str) -> float:
    """Return a number from 0 up to but not including 1, for argparse."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted 0 <= F < 1")
    return value


def positive(text: str) -> int:
    """Return a number from 1 on, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted at least 1")
    return value


def main() -> int:
    """Run the command; return its exit status."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts a thread per core, in each worker
    preparing = sys.argv[1:2] == [] or sys.argv[1] not in COMMANDS
    kept = "; what was committed is kept: the same command goes on" if preparing else ""
    try:
        return prepare() if preparing else look_after()
    except BadInput as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return EXIT_ERROR
    except OSError as error:  # a full disk, above all
        print(f"prepare_data.py: {error}{kept}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"prepare_data.py: interrupted{kept}", file=sys.stderr)
        return EXIT_INTERRUPTED


def prepare() -> int:
    """Read, encode and write every document, in the order of the sources."""
    arguments = parse_arguments()
    from tokens.prepare import Host, Request, prepare
    from tokens.splits import SplitRule

    bucket = arguments.output if "://" in arguments.output else None
    scratch = arguments.scratch or Path("token_files", arguments.output.rstrip("/").rpartition("/")[2])
    request = Request(
        sources=arguments.sources,
        directory=Path(arguments.output) if bucket is None else scratch,
        bucket=bucket,
        tokenizer=arguments.tokenizer,
        text_field=arguments.text_field,
        rule=SplitRule(
            kind=arguments.split,
            seed=arguments.split_seed,
            validation=arguments.validation_fraction,
            test=arguments.test_fraction,
        ),
        unit_bytes=arguments.unit_bytes,
        shard_tokens=arguments.shard_tokens,
        fail_on_bad_document=arguments.on_bad_document == "fail",
    )
    began = time.monotonic()
    display = Display()
    try:
        manifest = prepare(request, Host(make_executor=lambda: make_executor(arguments), say=say, show=display.show))
    finally:
        display.close()
    report(arguments, manifest, time.monotonic() - began)
    return EXIT_ERROR if too_many_bad(manifest) else EXIT_DONE


def make_executor(arguments: argparse.Namespace) -> "Executor":
    """Return who computes the units."""
    from tokens.executors import Inline, Processes, RayCluster

    if arguments.executor == "ray":
        return RayCluster(arguments.ray_address)
    return Inline() if arguments.executor == "inline" else Processes(arguments.workers)


def say(line: str) -> None:
    """Print a line for people."""
    print(line, file=sys.stderr)


def report(arguments: argparse.Namespace, manifest: dict[str, Any], seconds: float) -> None:
    """Print what was written, and what was not."""
    print(f"{arguments.output}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens in {seconds:.1f} s")
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
    asked = arguments.validation_fraction + arguments.test_fraction
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
            print(f"  {line}", file=sys.stderr)
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


def look_after() -> int:
    """Run one of COMMANDS on a token directory."""
    command = sys.argv[1]
    parser = argparse.ArgumentParser(prog=f"prepare_data.py {command}")
    reads_buckets = command in ("status", "verify")
    parser.add_argument("directory", metavar="DIR|s3://..." if reads_buckets else "DIR")
    if command == "stats":
        parser.add_argument("--end-of-text", type=int, metavar="ID", help="(the manifest's; without one: 50256)")
    if command == "push":
        parser.add_argument("repository", metavar="OWNER/NAME", help="of the dataset; is created if need be")
        parser.add_argument("--private", action="store_true", help="visible to its owner alone (public)")
        parser.add_argument("--license", metavar="ID", help="of the text, as the hub names it: mit, odc-by (not said)")
    arguments = parser.parse_args(sys.argv[2:])
    if "://" in arguments.directory and not reads_buckets:
        parser.error(f"{arguments.directory}: wanted a folder; copy the files there first")
    directory = Path(arguments.directory)
    if command == "stats":
        from tokens.stats import stats

        lines = stats(directory, arguments.end_of_text)
    elif command == "push":
        from tokens.publish import push

        lines = push(directory, arguments.repository, private=arguments.private, license_name=arguments.license)
    else:
        from tokens.audit import status, verify

        lines = {"status": status, "verify": verify}[command](arguments.directory)
    print("\n".join(lines))
    return EXIT_DONE


class Display:
    """A bar over the bytes of the sources in a terminal, a line every few seconds elsewhere, on stderr."""

    LINE_SECONDS = 10.0

    def __init__(self) -> None:
        self._began = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._first: tuple[int, int] | None = None  # tokens and bytes that were there when measuring began

    def show(self, progress: "Progress") -> None:
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


if __name__ == "__main__":
    sys.exit(main())
