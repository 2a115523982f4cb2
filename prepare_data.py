#!/usr/bin/env python3
"""Turn documents into token files: `python prepare_data.py SOURCE... --output DIR`; and look after them."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common.arguments import number, print_any_name, whole_number
from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, BadInput, printable
from common.installation import begin

if TYPE_CHECKING:
    from tokens.prepare.executors import Executor

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
        "--output",
        required=True,
        metavar="DIR|s3://...",
        help="output directory of the token files; resumes if partially written",
    )
    parser.add_argument("--tokenizer", default="gpt2", metavar="gpt2|bytes|FILE.tiktoken", help="default: gpt2")
    parser.add_argument("--text-field", default="text", metavar="NAME", help="field of records (default: text)")
    parser.add_argument(
        "--validation-fraction", type=number(0, 1), default=0.01, metavar="F", help="share of the documents (0.01)"
    )
    parser.add_argument("--test-fraction", type=number(0, 1), default=0.0, metavar="F", help="likewise (0)")
    parser.add_argument(
        "--split",
        choices=("hash", "tail"),
        default="hash",
        help="which documents are held out: by a hash of their text, or the last ones (default: hash)",
    )
    parser.add_argument("--split-seed", type=whole_number(0), default=0, metavar="N", help="of the hash (0)")
    parser.add_argument("--executor", choices=("process", "inline", "ray"), default="process", help="default: process")
    parser.add_argument(
        "--workers", type=whole_number(1), default=os.cpu_count(), metavar="N", help="processes (all cores)"
    )
    parser.add_argument("--ray-address", metavar="ADDRESS", help="of the cluster: auto, or HOST:PORT")
    parser.add_argument(
        "--unit-bytes", type=whole_number(1), default=1 << 24, metavar="N", help="of work, about (16777216)"
    )
    parser.add_argument(
        "--shard-tokens", type=whole_number(1), metavar="N", help="of each file, if a split has more (one file a split)"
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


def main() -> int:
    """Run the command; return its exit status."""
    begin("prepare_data.py")
    print_any_name()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts a thread per core, in each worker
    try:
        return look_after() if sys.argv[1:2] and sys.argv[1] in COMMANDS else prepare()
    except BadInput as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return EXIT_ERROR
    except OSError as error:
        print(f"prepare_data.py: {printable(str(error))}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt as interrupt:
        print(f"prepare_data.py: interrupted{interrupt}", file=sys.stderr)
        return EXIT_INTERRUPTED


def prepare() -> int:
    """Read, encode and write every document, in the order of the sources."""
    arguments = parse_arguments()
    from tokens.format.splits import SplitRule
    from tokens.prepare.display import Display, report, too_many_bad
    from tokens.prepare.prepare import Host, PrepareRequest, prepare

    bucket = arguments.output if "://" in arguments.output else None
    scratch = arguments.scratch or Path("token_files", arguments.output.rstrip("/").rpartition("/")[2])
    request = PrepareRequest(
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
    except OSError as error:  # a full disk, above all
        raise BadInput(f"{error}{kept_in(request.directory)}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept_in(request.directory)) from None
    finally:
        display.close()
    asked = arguments.validation_fraction + arguments.test_fraction
    report(arguments.output, manifest, asked, time.monotonic() - began)
    return EXIT_ERROR if too_many_bad(manifest) else EXIT_DONE


def kept_in(directory: Path) -> str:
    """Return what an interrupted command leaves behind, for its last line."""
    from tokens.prepare.commit_log import LEDGER

    begun = (directory / LEDGER).exists()
    return "; what was committed is kept: the same command goes on" if begun else ""


def make_executor(arguments: argparse.Namespace) -> "Executor":
    """Return who computes the units."""
    from tokens.prepare.executors import Inline, Processes, RayCluster

    if arguments.executor == "ray":
        return RayCluster(arguments.ray_address)
    return Inline() if arguments.executor == "inline" else Processes(arguments.workers)


def say(line: str) -> None:
    """Print a line for people."""
    print(printable(line), file=sys.stderr)


def look_after() -> int:
    """Run one of COMMANDS on a token directory."""
    command = sys.argv[1]
    parser = argparse.ArgumentParser(prog=f"prepare_data.py {command}")
    reads_buckets = command in ("status", "verify")
    parser.add_argument("directory", metavar="DIR|s3://..." if reads_buckets else "DIR")
    if command == "stats":
        parser.add_argument(
            "--end-of-text",
            type=whole_number(0, (1 << 32) - 1),
            metavar="ID",
            help="(the manifest's; without one: 50256)",
        )
    if command == "push":
        parser.add_argument("repository", metavar="OWNER/NAME", help="of the dataset; is created if need be")
        parser.add_argument("--private", action="store_true", help="visible to its owner alone (public)")
        parser.add_argument("--license", metavar="ID", help="of the text, as the hub names it: mit, odc-by (not said)")
    arguments = parser.parse_args(sys.argv[2:])
    if "://" in arguments.directory and not reads_buckets:
        parser.error(f"{arguments.directory}: wanted a folder; copy the files there first")
    directory = Path(arguments.directory)
    if command == "stats":
        from tokens.stats.stats import stats

        lines = stats(directory, arguments.end_of_text)
    elif command == "push":
        from tokens.hub.upload import push

        lines = push(directory, arguments.repository, private=arguments.private, license_name=arguments.license)
    else:
        from tokens.prepare.verify import status, verify

        lines = {"status": status, "verify": verify}[command](arguments.directory)
    print("\n".join(map(printable, lines)))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
