"""Command lines that prepare tokens or train a tokenizer."""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import attrs

from common.arguments import option
from common.checks import integer, number
from common.errors import UsageError
from common.files import is_bucket
from common.option_rules import OptionRules
from common.remote_files import REMOTE
from tokens.tokenizer.template import TURN_TOKENS

FRACTION = number(0, 1, below=True)
COUNT = integer(1)
SPECIAL = 1 + len(TURN_TOKENS)  # special tokens of a trained tokenizer: the end of text, and the markers of turns
TEXT_FIELD = "text"  # name of the field that is read by default
LARGEST_SAMPLE = (1 << 31) - 1  # bytes; the trainer counts pairs in 32 bits
LARGEST_SHARD = 5 * 10**9 // 4  # tokens of 4 bytes; S3 cannot copy an object to its final name if it has more than 5 GB


def _separator(text: str) -> str:
    data = text.encode(errors="surrogateescape")
    if not text.strip() or b"\0" in data or data != data.decode(errors="replace").encode():
        raise ValueError(f"got {text!r}, wanted UTF-8 text that is not blank")
    if any(data.startswith(data[start:]) for start in range(1, len(data))):
        raise ValueError(f"got {text!r}, wanted text that cannot overlap itself: its end must not equal its beginning")
    return text


def _json_file(text: str) -> Path:
    if not text.endswith(".json"):
        raise ValueError(f"got {text}, wanted a name ending in .json")
    return Path(text)


@attrs.frozen(kw_only=True)
class PrepareCommand:
    """Write train, validation and test token files and their manifest, in constant memory."""

    help_groups: ClassVar[dict[str, str]] = {
        "Input and output": "SOURCE... --output --scratch --shard-tokens",
        "Documents": "--tokenizer --text-field --separator --template --context-length --on-bad-document",
        "Held-out documents": "--validation-fraction --test-fraction --split --split-seed",
        "Workers": "--executor --workers --ray-address --unit-bytes",
    }
    option_rules: ClassVar[OptionRules] = OptionRules(
        needs={"--ray-address": "--executor=ray"},
        excludes={
            "--workers": "--executor=inline --executor=ray",
            "--split-seed": "--split=tail",
        },
    )
    sources: Annotated[
        tuple[str, ...], option("files, folders, buckets or datasets (see below)", name="SOURCE...", required=True)
    ] = attrs.field(kw_only=False)
    output: Annotated[
        str, option("token directory; an unfinished preparation is resumed", "DIR|s3://...|gs://...|az://...")
    ]
    tokenizer: Annotated[
        str,
        option(
            "name or file of the tokenizer; also cl100k or o200k; FILE is a .tiktoken, .model, .pkl or .json",
            "gpt2|bytes|chars|FILE",
        ),
    ] = "gpt2"
    text_field: Annotated[str, option("name of the field that contains the text of a record", "NAME")] = TEXT_FIELD
    separator: Annotated[
        str | None,
        option("text that separates documents in a file or record, such as '<|endoftext|>'", "TEXT", check=_separator),
    ] = None
    template: Annotated[
        str | None, option("prepare conversations, not text, with this template", "turns|alpaca|FILE.jinja")
    ] = None
    context_length: Annotated[
        int | None, option("tokens per row of conversations; same as context_length in model.json", "T", check=COUNT)
    ] = None
    validation_fraction: Annotated[
        float, option("share of the documents to hold out for validation", "F", check=FRACTION)
    ] = 0.01
    test_fraction: Annotated[float, option("share of the documents to hold out for test", "F", check=FRACTION)] = 0.0
    split: Annotated[
        Literal["hash", "tail"], option("how to hold out documents: by a hash of their text, or the last documents")
    ] = "hash"
    split_seed: Annotated[int, option("seed of the hash", "N", check=integer(0))] = 0
    executor: Annotated[
        Literal["process", "inline", "ray"],
        option("where to encode: in worker processes, in this process, or on a Ray cluster"),
    ] = "process"
    workers: Annotated[int, option("worker processes, normally one per core", "N", check=COUNT)] = os.cpu_count() or 1
    ray_address: Annotated[str | None, option("address of a Ray cluster: auto, or HOST:PORT", "ADDRESS")] = None
    unit_bytes: Annotated[int, option("approximate bytes of input per unit of work", "N", check=COUNT)] = 1 << 24
    shard_tokens: Annotated[int | None, option("tokens per file; default: one file per split", "N", check=COUNT)] = None
    scratch: Annotated[
        Path | None, option("folder for shards on their way to a bucket; default: token_files/NAME", "DIR")
    ] = None
    on_bad_document: Annotated[
        Literal["skip", "fail"], option("leave out and count bad documents, or stop at the first one")
    ] = "skip"

    def __attrs_post_init__(self) -> None:
        remote = self.bucket is not None
        if self.validation_fraction + self.test_fraction >= 1:
            raise UsageError(
                "--validation-fraction and --test-fraction: their sum must be below 1, so that something is left to "
                "train on"
            )
        if remote and not is_bucket(self.output.rstrip("/")):
            raise UsageError(f"--output {self.output}: wanted a folder, or s3://, gs:// or az://BUCKET/PREFIX")
        if remote and not 0 < (self.shard_tokens or 0) <= LARGEST_SHARD:
            raise UsageError(
                f"--output {self.output}: a bucket needs --shard-tokens N, with N at most {LARGEST_SHARD:,}"
            )
        if remote and self.split == "tail":
            raise UsageError(
                f"--output {self.output}: a bucket needs --split hash, because full shards leave the disk before the "
                "last documents are known"
            )
        if self.scratch is not None and not remote:
            raise UsageError("--scratch: only for an --output in a bucket")
        if (self.template is None) != (self.context_length is None):
            raise UsageError("--template and --context-length: conversations need both, and text needs neither")
        length, conflicting_options = (
            self.context_length or 1,
            [self.bucket, self.separator, self.text_field != TEXT_FIELD],
        )
        if self.template is not None and (any(conflicting_options) or self.tokenizer == "chars"):
            conflicts = "an output in a bucket, --separator, --text-field or --tokenizer chars"
            raise UsageError(f"--template {self.template}: cannot be combined with {conflicts}")
        if (self.shard_tokens or length) % length:
            raise UsageError(f"--shard-tokens {self.shard_tokens}: must be a multiple of --context-length {length}")

    @property
    def bucket(self) -> str | None:
        """The URL of an output in a bucket, or None for a folder."""
        return self.output if REMOTE in self.output else None

    @property
    def directory(self) -> Path:
        """The output folder or, for a bucket, a hidden folder that contains only its scratch files."""
        if self.bucket is None:
            return Path(self.output)
        return (self.scratch or Path("token_files", self.output.rstrip("/").rpartition("/")[2])) / ".scratch"


@attrs.frozen(kw_only=True)
class TokenizerCommand:
    """Train a byte-level BPE tokenizer, and write it to a single tokenizer.json."""

    sources: Annotated[
        tuple[str, ...],
        option("same sources as for a preparation; see prepare_data.py --help", name="SOURCE...", required=True),
    ] = attrs.field(kw_only=False)
    vocab_size: Annotated[
        int,
        option(
            f"number of ids: bytes, byte pairs and {SPECIAL} special tokens",
            "N",
            check=integer(256 + SPECIAL, 1 << 20),
        ),
    ]
    output: Annotated[
        Path, option("file to write; an existing file is never replaced", "FILE.json", check=_json_file)
    ] = Path("token_files/tokenizer.json")
    pattern: Annotated[
        Literal["cl100k", "gpt2", "o200k"],
        option("how to split text; gpt2 keeps any number of digits together, the other patterns up to three"),
    ] = "cl100k"
    sample_bytes: Annotated[
        int,
        option(
            "maximum bytes of text to read; larger sources are sampled evenly", "N", check=integer(1, LARGEST_SAMPLE)
        ),
    ] = 200_000_000
    text_field: Annotated[str, option("name of the field that contains the text of a record", "NAME")] = TEXT_FIELD
    separator: Annotated[str | None, option("text that separates documents", "TEXT", check=_separator)] = None
