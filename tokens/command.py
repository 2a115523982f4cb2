"""Command lines of prepare_data.py: prepare tokens, or inspect, verify and publish a token directory."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, cast

from common.arguments import ScriptTexts, option, parse, usage_error
from common.checks import KeyRows, integer
from common.remote_files import REMOTE
from tokens.prepare.command import PrepareCommand, TokenizerCommand

EPILOG = """sources:
  FILE, FOLDER or 'GLOB'   .txt .md .py (a file is a document),
                           .jsonl .json (a line is; .gz, .zst), .parquet
  s3://... gs://... az://... https://... hf://...   the same; over http a
                           folder's name ends in /; AWS_ENDPOINT_URL: an S3
                           server other than Amazon's
  hf:OWNER/NAME[:CONFIG][@REVISION]   data files of the train split of a
                           Hugging Face dataset
  stdlib                   source code of the running Python's standard library:
                           real text on every machine

examples:
  python prepare_data.py stdlib --output token_files/stdlib --tokenizer bytes
  python prepare_data.py hf:HuggingFaceFW/fineweb:sample-10BT \\
      --output token_files/fineweb-10b
  python prepare_data.py s3://BUCKET/texts --output s3://BUCKET/tokens \\
      --shard-tokens 100000000

commands (write ./status for a source of that name):
  python prepare_data.py tokenizer SOURCE... --vocab-size N
                                        train an own tokenizer: byte pairs
  python prepare_data.py status DIR     progress of a preparation
  python prepare_data.py verify DIR     check token files against their manifest
  python prepare_data.py stats DIR      document lengths, also as a chart,
                                        duplicates and contamination
  python prepare_data.py push DIR OWNER/NAME [--private] [--license mit]
                                        upload to the Hugging Face hub
status and verify also take s3://... (gs://, az://) as DIR.

The same command resumes an interrupted or killed one, with --output s3://...
on any machine; the number of workers may change.

Exit status: 0 done; 1 error, a damaged file, text that is not UTF-8, or more
than 1 % of the documents bad; 2 usage; 130 interrupted.
"""


def _local_folder(text: str) -> str:
    if REMOTE in text:
        raise ValueError(f"{text}: wanted a folder; copy the files there first")
    return text


BucketOrDirectory = Annotated[str, option("token directory, or s3://...", name="DIR")]
Directory = Annotated[str, option("token directory", name="DIR", check=_local_folder)]
OUTPUTS = {"--output"[:length] for length in range(len("--o"), len("--output") + 1)}  # and what abbreviates it
Lines = Callable[[], list[str]]  # does the work of a command; returns lines to print


def _call(module: str, name: str, *arguments: Any, **options: Any) -> list[str]:
    """Call a function; its module is imported now, when Ctrl-C is one line."""
    return cast(list[str], getattr(import_module(module), name)(*arguments, **options))


def status_command(directory: BucketOrDirectory) -> Lines:
    """Progress of a preparation."""
    return partial(_call, "tokens.prepare.verify", "status", directory)


def verify_command(directory: BucketOrDirectory) -> Lines:
    """Check every token file against its manifest."""
    return partial(_call, "tokens.prepare.verify", "verify", directory)


def stats_command(
    directory: Directory,
    *,
    end_of_text: Annotated[
        int | None, option("end-of-text id; default: the manifest's, or 50256", "ID", check=integer(0, (1 << 32) - 1))
    ] = None,
    against: Annotated[
        tuple[Path, ...], option("JSON Lines, or the held-out splits of a token directory: is it in train?", "FILE|DIR")
    ] = (),
    near_duplicates: Annotated[bool, option("look for documents that are nearly alike")] = False,
) -> Lines:
    """Document lengths, also as a chart, bytes per token, duplicates and contamination."""
    options = {"against": against, "near_duplicates": near_duplicates}
    return partial(_call, "tokens.stats.stats", "stats", Path(directory), end_of_text, **options)


def push_command(
    directory: Directory,
    repository: Annotated[str, option("dataset; created if it does not exist", name="OWNER/NAME")],
    *,
    private: Annotated[bool, option("visible only to its owner; default: public")] = False,
    license: Annotated[str | None, option("license, a hub id such as odc-by; default: none", "ID")] = None,
) -> Lines:
    """Upload to the Hugging Face hub, as a dataset."""
    options = {"private": private, "license_name": license}
    return partial(_call, "tokens.hub.upload", "push", Path(directory), repository, **options)


COMMANDS: dict[str, Any] = {
    "tokenizer": TokenizerCommand,
    "status": status_command,
    "verify": verify_command,
    "stats": stats_command,
    "push": push_command,
}


def parse_command_line(words: Sequence[str], key_rows: Callable[[], KeyRows] = dict) -> PrepareCommand | Lines:
    """Return the command of a command line: the first word is one of COMMANDS, or anything else prepares tokens.

    `key_rows`: as of `parse`.
    """
    script = "prepare_data.py"
    reads_only = bool(words) and words[0] in COMMANDS and words[0] != "tokenizer"
    if reads_only and any(word.partition("=")[0] in OUTPUTS for word in words):
        advice = f"for a source of that name write ./{words[0]}, for the command {script} {words[0]} DIR"
        raise usage_error(f"'{words[0]}' is a command, which takes no --output; {advice}")
    texts = ScriptTexts(epilog=EPILOG)
    command = parse(script, {"": PrepareCommand, **COMMANDS}, words, texts=texts, key_rows=key_rows)
    if isinstance(command, TokenizerCommand):
        return partial(_call, "tokens.prepare.trained_tokenizer", "train_tokenizer", command)
    return cast("PrepareCommand | Lines", command)
