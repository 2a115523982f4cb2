"""Command lines of prepare_data.py: prepare tokens, or inspect, verify and publish a token directory."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs

from common.arguments import Command, ScriptTexts, option, read_command, usage_error
from common.checks import KeyRows, integer
from common.output import keep_logs_only, show
from common.remote_files import REMOTE
from common.text import closest, quoted
from tokens.prepare.command import PrepareCommand, TokenizerCommand

EPILOG = """sources:
  FILE, FOLDER or 'GLOB'   one document per file: .txt, .md, .py
                           one document per line: .jsonl, .json (or .gz, .zst)
                           one document per row: .parquet
  s3://... gs://... az://... https://... hf://...
                           such files in a bucket or on a server; with
                           https, end a folder's name with /; for an S3 server
                           other than Amazon's, set AWS_ENDPOINT_URL
  hf:OWNER/NAME[:CONFIG][@REVISION]
                           the train split of a dataset on the Hugging Face
                           hub
  stdlib                   source code of this Python's standard library:
                           real text that every machine has

examples:
  python prepare_data.py stdlib --output token_files/stdlib --tokenizer bytes
  python prepare_data.py hf:HuggingFaceFW/fineweb:sample-10BT \\
      --output token_files/fineweb-10b
  python prepare_data.py s3://BUCKET/texts --output s3://BUCKET/tokens \\
      --shard-tokens 100000000

commands (if a source has the name of a command, write for example ./status):
  python prepare_data.py tokenizer SOURCE... --vocab-size N
                                        train your own byte-pair tokenizer
  python prepare_data.py status DIR     show the progress of a preparation
  python prepare_data.py verify DIR     check token files against their manifest
  python prepare_data.py stats DIR      measure document lengths (with a chart),
                                        duplicates and contamination
  python prepare_data.py push DIR OWNER/NAME [--private] [--license mit]
                                        upload to the Hugging Face hub
For status and verify, DIR may also be in a bucket (s3://, gs:// or az://).

To resume an interrupted or killed preparation, rerun the same command. The
number of workers may change. With --output s3://... any machine can resume it.

Exit status: 0 done; 1 error, a damaged file, text that is not UTF-8, or bad
documents (more than 1% of them); 2 usage; 130 interrupted.
"""


def _local_folder(text: str) -> str:
    if REMOTE in text:
        raise ValueError(f"{text}: this command reads only local folders; copy the files into one first")
    return text


BucketOrDirectory = Annotated[str, option("token directory, or a bucket such as s3://...", name="DIR")]
Directory = Annotated[str, option("token directory", name="DIR", check=_local_folder)]
# --output and its abbreviations
OUTPUTS = {"--output"[:length] for length in range(len("--o"), len("--output") + 1)}


@attrs.frozen
class StatusCommand:
    """Show the progress of a preparation."""

    directory: BucketOrDirectory


@attrs.frozen
class VerifyCommand:
    """Check every token file against its manifest."""

    directory: BucketOrDirectory


@attrs.frozen
class StatsCommand:
    """Measure document lengths (also as a chart), bytes per token, duplicates and contamination."""

    directory: Directory
    end_of_text: Annotated[
        int | None,
        option("end-of-text id; default: the one in the manifest, or 50256", "ID", check=integer(0, (1 << 32) - 1)),
    ] = attrs.field(default=None, kw_only=True)
    against: Annotated[
        tuple[Path, ...],
        option(
            "look in the train split for the texts of a JSON Lines file, or of a token directory's held-out splits",
            "FILE|DIR",
        ),
    ] = attrs.field(default=(), kw_only=True)
    near_duplicates: Annotated[bool, option("look for documents that are almost the same")] = attrs.field(
        default=False, kw_only=True
    )


@attrs.frozen
class PushCommand:
    """Upload a token directory to the Hugging Face hub as a dataset."""

    directory: Directory
    repository: Annotated[str, option("dataset on the hub; created if it does not exist", name="OWNER/NAME")]
    private: Annotated[bool, option("make the dataset private; default: public")] = attrs.field(
        default=False, kw_only=True
    )
    license: Annotated[str | None, option("license as a hub id, such as odc-by; default: none", "ID")] = attrs.field(
        default=None, kw_only=True
    )


COMMANDS = {
    "": Command(PrepareCommand, __name__, "write_tokens"),
    "tokenizer": Command(TokenizerCommand, __name__, "write_tokenizer"),
    "status": Command(StatusCommand, __name__, "show_status"),
    "verify": Command(VerifyCommand, __name__, "show_verified"),
    "stats": Command(StatsCommand, __name__, "show_stats"),
    "push": Command(PushCommand, __name__, "push"),
}


def _misspelled_command(words: Sequence[str]) -> str | None:
    """If the first word is neither a command nor a source, return the command that was probably meant.

    Returns None if the first word is a command or an existing file, or if the command line has --output.
    """
    if not words or words[0] in COMMANDS or any(word.partition("=")[0] in OUTPUTS for word in words):
        return None
    return None if os.path.lexists(words[0]) else closest(words[0], filter(None, COMMANDS))


def read_command_line(words: Sequence[str], key_rows: Callable[[], KeyRows] = dict) -> tuple[Command, Any]:
    """Like `read_command`, return the command that a command line calls, and the values of its options.

    The first word selects one of COMMANDS. If it is not the name of a command, the command line prepares tokens.
    """
    script = "prepare_data.py"
    reads_only = bool(words) and words[0] in COMMANDS and words[0] not in ("", "tokenizer")
    if reads_only and any(word.partition("=")[0] in OUTPUTS for word in words):
        source_advice = f"to prepare a source of that name, write ./{words[0]}"
        advice = f"{source_advice}; to run the command, write {script} {words[0]} DIR"
        raise usage_error(f"'{words[0]}' is a command and takes no --output; {advice}")
    if suggestion := _misspelled_command(words):
        raise usage_error(f"{quoted(words[0])}: unknown command; did you mean '{suggestion}'?")
    return read_command(script, COMMANDS, words, texts=ScriptTexts(epilog=EPILOG), key_rows=key_rows)


def write_tokens(command: PrepareCommand) -> None:
    """Prepare tokens and print a report.

    Raises BadInput for a wrong input, and also at the end if too much of the input could not be read.
    """
    from tokens.prepare.display import refuse_losses, report
    from tokens.prepare.prepare import prepare

    keep_logs_only()
    started_at = time.monotonic()
    manifest = prepare(command)
    report(command, manifest, time.monotonic() - started_at)
    refuse_losses(manifest, sum(source.bytes for source in manifest.sources), "the token files are")


def write_tokenizer(command: TokenizerCommand) -> None:
    from tokens.prepare.trained_tokenizer import train_tokenizer

    show(*train_tokenizer(command))


def show_status(command: StatusCommand) -> None:
    from tokens.prepare.verify import status

    show(*status(command.directory))


def show_verified(command: VerifyCommand) -> None:
    from tokens.prepare.verify import verify

    show(*verify(command.directory))


def show_stats(command: StatsCommand) -> None:
    from tokens.stats.stats import stats

    directory, end_of_text = Path(command.directory), command.end_of_text
    show(*stats(directory, end_of_text, command.against, near_duplicates=command.near_duplicates))


def push(command: PushCommand) -> None:
    from tokens.hub import upload

    directory, private = Path(command.directory), command.private
    show(*upload.push(directory, command.repository, private=private, license_name=command.license))
