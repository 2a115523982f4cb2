"""Command lines of prepare_data.py: prepare tokens, or inspect, verify and publish a token directory."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Protocol

import attrs

from common.arguments import UsageError, number, option, parse, refuse, whole_number
from common.remote_files import REMOTE

EPILOG = """sources:
  FILE, FOLDER or 'GLOB'   .txt .md .py (a file is a document),
                           .jsonl .json (a line is; .gz, .zst), .parquet
  s3://... gs://... https://...   the same, by fsspec (pip install s3fs, gcsfs,
                           aiohttp); over http a folder's name ends in /;
                           AWS_ENDPOINT_URL: an S3 server other than Amazon's
  hf:OWNER/NAME[:CONFIG][@REVISION]   data files of the train split of a
                           Hugging Face dataset
  stdlib                   source code of the running Python's standard library:
                           real text on every machine

examples:
  python prepare_data.py stdlib --output token_files/quickstart --tokenizer bytes
  python prepare_data.py hf:HuggingFaceFW/fineweb:sample-10BT \\
      --output token_files/fineweb-10b
  python prepare_data.py s3://BUCKET/texts --output s3://BUCKET/tokens \\
      --shard-tokens 100000000

commands (a source of such a name is written ./status):
  python prepare_data.py status DIR     progress of a preparation
  python prepare_data.py verify DIR     check token files against their manifest
  python prepare_data.py stats DIR      document lengths, also as a chart,
                                        duplicates and contamination
  python prepare_data.py push DIR OWNER/NAME [--private] [--license mit]
                                        upload to the Hugging Face hub
status and verify also take s3://... as DIR.

With --output s3://... full shards leave this disk at once, with all that
another machine needs to resume. The same command resumes an interrupted or
killed one; the number of workers may change. No incomplete file ever has its
final name.

Exit status: 0 done; 1 error, a damaged file, or more than 1 % of the documents
bad; 2 usage; 130 interrupted.
"""
FRACTION = number(0, 1)
COUNT = whole_number(1)
BucketOrDirectory = Annotated[str, option("token directory, or s3://...", name="DIR")]
Directory = Annotated[str, option("token directory", name="DIR")]


@attrs.frozen(kw_only=True)
class PrepareCommand:
    """Write train, validation and test token files and their manifest, in constant memory."""

    sources: Annotated[
        tuple[str, ...], option("files, folders, buckets or datasets: see below", name="SOURCE...", required=True)
    ] = attrs.field(kw_only=False)
    output: Annotated[str, option("output directory of the token files; resumes if partially written", "DIR|s3://...")]
    tokenizer: Annotated[str, option("text to token ids", "gpt2|bytes|FILE.tiktoken")] = "gpt2"
    text_field: Annotated[str, option("field of records", "NAME")] = "text"
    validation_fraction: Annotated[
        float, option("share of the documents held out for validation", "F", check=FRACTION)
    ] = 0.01
    test_fraction: Annotated[float, option("share for test", "F", check=FRACTION)] = 0.0
    split: Annotated[
        Literal["hash", "tail"], option("held-out documents: by a hash of their text, or the last ones")
    ] = "hash"
    split_seed: Annotated[int, option("seed of the hash", "N", check=whole_number(0))] = 0
    executor: Annotated[Literal["process", "inline", "ray"], option("where units are computed")] = "process"
    workers: Annotated[int, option("worker processes, one per core", "N", check=COUNT)] = attrs.field(
        factory=lambda: os.cpu_count() or 1
    )
    ray_address: Annotated[str | None, option("Ray cluster: auto, or HOST:PORT", "ADDRESS")] = None
    unit_bytes: Annotated[int, option("approximate input of a unit of work", "N", check=COUNT)] = 1 << 24
    shard_tokens: Annotated[
        int | None, option("tokens of each file of a split; default: one file per split", "N", check=COUNT)
    ] = None
    scratch: Annotated[
        Path | None, option("folder for shards on their way to an s3:// output; default: token_files/NAME", "DIR")
    ] = None
    on_bad_document: Annotated[
        Literal["skip", "fail"], option("skip: count and leave out bad documents; fail: stop at the first")
    ] = "skip"

    def __attrs_post_init__(self) -> None:
        remote = REMOTE in self.output
        if self.validation_fraction + self.test_fraction >= 1:
            raise UsageError("--validation-fraction and --test-fraction: wanted a sum below 1, something to train on")
        if remote and not self.output.startswith("s3://"):
            raise UsageError(f"--output {self.output}: wanted a folder, or s3://BUCKET/PREFIX")
        if remote and self.shard_tokens is None:
            raise UsageError("--output s3://...: wanted --shard-tokens N, so that finished shards can leave this disk")
        if remote and self.split == "tail":
            raise UsageError(
                "--output s3://...: wanted --split hash; the tail would be cut from shards that have left this disk"
            )
        if self.scratch is not None and not remote:
            raise UsageError("--scratch: only for an s3:// output")


class DirectoryCommand(Protocol):
    """Command on a token directory."""

    def lines(self) -> Sequence[str]:
        """Do the work; return what to print."""


@attrs.frozen
class StatusCommand:
    """Progress of a preparation."""

    directory: BucketOrDirectory

    def lines(self) -> Sequence[str]:
        """Return the progress."""
        from tokens.prepare.verify import status

        return status(self.directory)


@attrs.frozen
class VerifyCommand:
    """Check every token file against its manifest."""

    directory: BucketOrDirectory

    def lines(self) -> Sequence[str]:
        """Check and describe the files."""
        from tokens.prepare.verify import verify

        return verify(self.directory)


@attrs.frozen(kw_only=True)
class StatsCommand:
    """Document lengths, also as a chart, duplicates and contamination."""

    directory: Directory = attrs.field(kw_only=False)
    end_of_text: Annotated[
        int | None,
        option("end-of-text id; default: the manifest's, or 50256", "ID", check=whole_number(0, (1 << 32) - 1)),
    ] = None

    def __attrs_post_init__(self) -> None:
        _check_local(self.directory)

    def lines(self) -> Sequence[str]:
        """Return the statistics."""
        from tokens.stats.stats import stats

        return stats(Path(self.directory), self.end_of_text)


@attrs.frozen(kw_only=True)
class PushCommand:
    """Upload to the Hugging Face hub, as a dataset."""

    directory: Directory = attrs.field(kw_only=False)
    repository: Annotated[str, option("dataset; created if it does not exist", name="OWNER/NAME")] = attrs.field(
        kw_only=False
    )
    private: Annotated[bool, option("visible only to its owner; default: public")] = False
    license: Annotated[str | None, option("license of the text by its hub id: mit, odc-by; default: none", "ID")] = None

    def __attrs_post_init__(self) -> None:
        _check_local(self.directory)

    def lines(self) -> Sequence[str]:
        """Upload, and return what was uploaded."""
        from tokens.hub.upload import push

        return push(Path(self.directory), self.repository, private=self.private, license_name=self.license)


COMMANDS: dict[str, type[DirectoryCommand]] = {
    "status": StatusCommand,
    "verify": VerifyCommand,
    "stats": StatsCommand,
    "push": PushCommand,
}


def parse_command_line(words: Sequence[str]) -> PrepareCommand | DirectoryCommand:
    """Return the command of a command line.

    The first word decides: the name of one of COMMANDS, or anything else to prepare tokens. A source of such a name is
    written with its folder, ./stats; with an option of the other grammar the line is refused.
    """
    script = "prepare_data.py"
    command: PrepareCommand | DirectoryCommand
    if not words or words[0] not in COMMANDS:
        command = parse(script, PrepareCommand, words, epilog=EPILOG)
        return command
    if any(word.startswith("--o") and "--output".startswith(word.partition("=")[0]) for word in words):
        refuse(
            script,
            f"'{words[0]}' is a command, which takes no --output; for a source of that name write ./{words[0]}, for "
            f"the command {script} {words[0]} DIR",
        )
    command = parse(script, COMMANDS, words)
    return command


def _check_local(directory: str) -> None:
    if REMOTE in directory:
        raise UsageError(f"{directory}: wanted a folder; copy the files there first")
