#!/usr/bin/env python3
"""Prepare token files: `prepare_data.py SOURCE... --output DIR`; inspect, verify and publish token directories."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common.arguments import number, print_any_name, whole_number
from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, BadInput, printable
from common.installation import begin
from common.remote_files import REMOTE

if TYPE_CHECKING:
    from tokens.prepare.executors import Executor

EPILOG = """sources:
  FILE, FOLDER or 'GLOB'   .txt .md .py (a file is a document), .jsonl .json (a line is; .gz, .zst), .parquet
  s3://... gs://... https://...   the same, by fsspec (pip install s3fs, gcsfs, aiohttp); over http a folder's name
                           ends in /; AWS_ENDPOINT_URL names an S3 server other than Amazon's
  hf:OWNER/NAME[:CONFIG][@REVISION]   the data files of a Hugging Face dataset's train split
  stdlib                   the running Python's own library sources: real text that is on every machine

examples:
  python prepare_data.py stdlib --output token_files/quickstart --tokenizer bytes --validation-fraction 0.03
  python prepare_data.py hf:HuggingFaceFW/fineweb:sample-10BT --output token_files/fineweb-10b
  python prepare_data.py s3://BUCKET/texts --output s3://BUCKET/tokens --shard-tokens 100000000

commands (a source of such a name is written ./status):
  python prepare_data.py status DIR     progress of a preparation; DIR may be s3://..., here and for verify
  python prepare_data.py verify DIR     check every token file against its manifest
  python prepare_data.py stats DIR      document lengths, also as a chart, duplicates and contamination
  python prepare_data.py push DIR OWNER/NAME [--private] [--license mit]     upload to the Hugging Face hub

With --output s3://... full shards leave this disk at once, with all that another machine needs to resume.
The same command resumes an interrupted or killed one; the number of workers may change.
Exit status: 0 done; 1 error, a damaged file, or more than 1 % of the documents bad; 2 usage; 130 interrupted. No
incomplete file ever has its final name.
"""

COMMANDS = {
    "status": "Progress of a preparation.",
    "verify": "Check every token file against its manifest.",
    "stats": "Document lengths, also as a chart, duplicates and contamination.",
    "push": "Upload to the Hugging Face hub, as a dataset.",
}
READS_BUCKETS = ("status", "verify")


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Return the options of a command line; `command` is one of COMMANDS, or None to prepare tokens.

    The first word decides: a command's name, or anything else to prepare tokens. A source of such a name is written
    with its folder, ./stats; with an option of the other grammar the line is refused.
    """
    if words[:1] and words[0] in COMMANDS:
        command = words[0]
        parser = _command_parser(command)
        if any(word.startswith("--o") and "--output".startswith(word.partition("=")[0]) for word in words):
            parser.error(
                f"'{command}' is a command, which takes no --output; for a source of that name write ./{command}, for "
                f"the command prepare_data.py {command} DIR"
            )
        arguments = parser.parse_args(words[1:], argparse.Namespace(command=command))
        if REMOTE in arguments.directory and command not in READS_BUCKETS:
            parser.error(f"{arguments.directory}: wanted a folder; copy the files there first")
        return arguments
    parser = _prepare_parser()
    arguments = parser.parse_args(words, argparse.Namespace(command=None))
    _check_options(parser, arguments)
    return arguments


def _command_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"prepare_data.py {command}", description=COMMANDS[command])
    parser.add_argument("directory", metavar="DIR|s3://..." if command in READS_BUCKETS else "DIR")
    if command == "stats":
        parser.add_argument(
            "--end-of-text",
            type=whole_number(0, (1 << 32) - 1),
            metavar="ID",
            help="end-of-text id (that of the manifest; without one: 50256)",
        )
    if command == "push":
        parser.add_argument("repository", metavar="OWNER/NAME", help="dataset; created if it does not exist")
        parser.add_argument("--private", action="store_true", help="visible to its owner alone (public)")
        parser.add_argument("--license", metavar="ID", help="license of the text by its hub id: mit, odc-by (none)")
    return parser


def _prepare_parser() -> argparse.ArgumentParser:
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
        "--validation-fraction",
        type=number(0, 1),
        default=0.01,
        metavar="F",
        help="share of the documents held out for validation (0.01)",
    )
    parser.add_argument("--test-fraction", type=number(0, 1), default=0.0, metavar="F", help="share for test (0)")
    parser.add_argument(
        "--split",
        choices=("hash", "tail"),
        default="hash",
        help="held-out documents: by a hash of their text, or the last ones (default: hash)",
    )
    parser.add_argument("--split-seed", type=whole_number(0), default=0, metavar="N", help="seed of the hash (0)")
    parser.add_argument(
        "--executor",
        choices=("process", "inline", "ray"),
        default="process",
        help="where units are computed (default: process)",
    )
    parser.add_argument(
        "--workers", type=whole_number(1), default=os.cpu_count(), metavar="N", help="worker processes (all cores)"
    )
    parser.add_argument("--ray-address", metavar="ADDRESS", help="Ray cluster: auto, or HOST:PORT")
    parser.add_argument(
        "--unit-bytes",
        type=whole_number(1),
        default=1 << 24,
        metavar="N",
        help="approximate input of a unit of work (16777216)",
    )
    parser.add_argument(
        "--shard-tokens", type=whole_number(1), metavar="N", help="tokens of each file of a split (one file a split)"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="folder for shards on their way to an s3:// output (token_files/NAME)",
    )
    parser.add_argument(
        "--on-bad-document",
        choices=("skip", "fail"),
        default="skip",
        help="skip: count and leave out bad documents; fail: stop at the first (default: skip)",
    )
    return parser


def _check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    remote = REMOTE in arguments.output
    if arguments.validation_fraction + arguments.test_fraction >= 1:
        parser.error("--validation-fraction and --test-fraction: wanted a sum below 1, something to train on")
    if remote and not arguments.output.startswith("s3://"):
        parser.error(f"--output {arguments.output}: wanted a folder, or s3://BUCKET/PREFIX")
    if remote and arguments.shard_tokens is None:
        parser.error("--output s3://...: wanted --shard-tokens N, so that finished shards can leave this disk")
    if remote and arguments.split == "tail":
        parser.error(
            "--output s3://...: wanted --split hash; the tail would be cut from shards that have left this disk"
        )
    if arguments.scratch is not None and not remote:
        parser.error("--scratch: only for an s3:// output")


def main() -> int:
    """Run the command; return its exit status."""
    begin("prepare_data.py")
    print_any_name()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts a thread per core, in each worker
    try:
        arguments = parse_arguments(sys.argv[1:])
        return prepare(arguments) if arguments.command is None else run_command(arguments)
    except BadInput as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return EXIT_ERROR
    except OSError as error:
        print(f"prepare_data.py: {printable(str(error))}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt as interrupt:
        print(f"prepare_data.py: interrupted{interrupt}", file=sys.stderr)
        return EXIT_INTERRUPTED


def prepare(arguments: argparse.Namespace) -> int:
    """Read, encode and write every document, in the order of the sources."""
    from tokens.format.splits import SplitRule
    from tokens.prepare.display import Display, report, too_many_bad
    from tokens.prepare.prepare import Host, PrepareRequest, prepare

    bucket = arguments.output if REMOTE in arguments.output else None
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
    """Return the end of the last line of an interrupted command: whether it can be resumed."""
    from tokens.prepare.commit_log import LEDGER

    begun = (directory / LEDGER).exists()
    return "; what was committed is kept: the same command goes on" if begun else ""


def make_executor(arguments: argparse.Namespace) -> "Executor":
    """Return the executor of the units of work."""
    from tokens.prepare.executors import Inline, Processes, RayCluster

    if arguments.executor == "ray":
        return RayCluster(arguments.ray_address)
    return Inline() if arguments.executor == "inline" else Processes(arguments.workers)


def say(line: str) -> None:
    """Print a line on stderr."""
    print(printable(line), file=sys.stderr)


def run_command(arguments: argparse.Namespace) -> int:
    """Run one of COMMANDS on a token directory."""
    directory = Path(arguments.directory)
    if arguments.command == "stats":
        from tokens.stats.stats import stats

        lines = stats(directory, arguments.end_of_text)
    elif arguments.command == "push":
        from tokens.hub.upload import push

        lines = push(directory, arguments.repository, private=arguments.private, license_name=arguments.license)
    else:
        from tokens.prepare.verify import status, verify

        lines = {"status": status, "verify": verify}[arguments.command](arguments.directory)
    print("\n".join(map(printable, lines)))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
