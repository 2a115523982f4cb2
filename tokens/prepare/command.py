"""Command lines of a preparation, and of a tokenizer's training."""

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
SPECIAL = 1 + len(TURN_TOKENS)  # tokens of an own tokenizer: the end of text, turns of conversations
TEXT_FIELD = "text"  # of a record, unless another one is named
LARGEST_SAMPLE = (1 << 31) - 1  # the trainer counts pairs in 32 bits
LARGEST_SHARD = 5 * 10**9 // 4  # tokens of 4 bytes: S3 copies no object of more than 5 GB to its final name


def _separator(text: str) -> str:
    data = text.encode(errors="surrogateescape")
    if not text.strip() or b"\0" in data or data != data.decode(errors="replace").encode():
        raise ValueError(f"got {text!r}, wanted text that is more than white space, in UTF-8")
    if any(data.startswith(data[start:]) for start in range(1, len(data))):
        raise ValueError(f"got {text!r}, wanted a text that cannot overlap itself: one whose end is not its beginning")
    return text


def _json_file(text: str) -> Path:
    if not text.endswith(".json"):
        raise ValueError(f"got {text}, wanted a name ending in .json")
    return Path(text)


@attrs.frozen(kw_only=True)
class PrepareCommand:
    """Write train, validation and test token files and their manifest, in constant memory."""

    option_rules: ClassVar[OptionRules] = OptionRules(
        needs={"--ray-address": "--executor=ray"},
        excludes={
            "--workers": "--executor=inline --executor=ray",
            "--split-seed": "--split=tail",
        },
    )
    sources: Annotated[
        tuple[str, ...], option("files, folders, buckets or datasets: see below", name="SOURCE...", required=True)
    ] = attrs.field(kw_only=False)
    output: Annotated[str, option("token directory; resumes if partially written", "DIR|s3://...|gs://...|az://...")]
    tokenizer: Annotated[
        str, option("text to ids; or cl100k, o200k; FILE: .tiktoken, .model, .pkl, .json", "gpt2|bytes|chars|FILE")
    ] = "gpt2"
    text_field: Annotated[str, option("field of records", "NAME")] = TEXT_FIELD
    separator: Annotated[
        str | None, option("text between documents of a file or record: '<|endoftext|>'", "TEXT", check=_separator)
    ] = None
    template: Annotated[str | None, option("conversations, not text: their template", "turns|alpaca|FILE.jinja")] = None
    context_length: Annotated[int | None, option("row of conversations: model.json's", "T", check=COUNT)] = None
    validation_fraction: Annotated[float, option("share of the documents for validation", "F", check=FRACTION)] = 0.01
    test_fraction: Annotated[float, option("share for test", "F", check=FRACTION)] = 0.0
    split: Annotated[Literal["hash", "tail"], option("held out: by a hash of the text, or the last ones")] = "hash"
    split_seed: Annotated[int, option("seed of the hash", "N", check=integer(0))] = 0
    executor: Annotated[Literal["process", "inline", "ray"], option("where units are computed")] = "process"
    workers: Annotated[int, option("worker processes, one per core", "N", check=COUNT)] = os.cpu_count() or 1
    ray_address: Annotated[str | None, option("Ray cluster: auto, or HOST:PORT", "ADDRESS")] = None
    unit_bytes: Annotated[int, option("approximate input of a unit of work", "N", check=COUNT)] = 1 << 24
    shard_tokens: Annotated[int | None, option("tokens per file; default: one file per split", "N", check=COUNT)] = None
    scratch: Annotated[Path | None, option("shards on their way to a bucket; default: token_files/NAME", "DIR")] = None
    on_bad_document: Annotated[Literal["skip", "fail"], option("count and leave out, or stop at the first")] = "skip"

    def __attrs_post_init__(self) -> None:
        remote = self.bucket is not None
        if self.validation_fraction + self.test_fraction >= 1:
            raise UsageError("--validation-fraction and --test-fraction: wanted a sum below 1, something to train on")
        if remote and not is_bucket(self.output.rstrip("/")):
            raise UsageError(f"--output {self.output}: wanted a folder, or s3://, gs:// or az://BUCKET/PREFIX")
        if remote and not 0 < (self.shard_tokens or 0) <= LARGEST_SHARD:
            raise UsageError(f"--output {self.output}: wanted --shard-tokens N, at most {LARGEST_SHARD:,}")
        if remote and self.split == "tail":
            raise UsageError(f"--output {self.output}: wanted --split hash; a tail leaves the disk before it is cut")
        if self.scratch is not None and not remote:
            raise UsageError("--scratch: only for an output in a bucket")
        if (self.template is None) != (self.context_length is None):
            raise UsageError("--template and --context-length: wanted both, for conversations, or neither, for text")
        length, others = self.context_length or 1, [self.bucket, self.separator, self.text_field != TEXT_FIELD]
        if self.template is not None and (any(others) or self.tokenizer == "chars"):
            unfit = "an output in a bucket, --separator, --text-field or --tokenizer chars"
            raise UsageError(f"--template {self.template}: does not go with {unfit}")
        if (self.shard_tokens or length) % length:
            raise UsageError(f"--shard-tokens {self.shard_tokens}: wanted a multiple of --context-length {length}")

    @property
    def bucket(self) -> str | None:
        """The URL of an output in a bucket, None for a folder."""
        return self.output if REMOTE in self.output else None

    @property
    def directory(self) -> Path:
        """The output folder; of a bucket, a hidden folder for its scratch files alone."""
        if self.bucket is None:
            return Path(self.output)
        return (self.scratch or Path("token_files", self.output.rstrip("/").rpartition("/")[2])) / ".scratch"


@attrs.frozen(kw_only=True)
class TokenizerCommand:
    """Train a byte-level BPE tokenizer, and write it as one tokenizer.json."""

    sources: Annotated[
        tuple[str, ...], option("as of a preparation: see prepare_data.py --help", name="SOURCE...", required=True)
    ] = attrs.field(kw_only=False)
    vocab_size: Annotated[
        int, option(f"ids: bytes, byte pairs and {SPECIAL} special tokens", "N", check=integer(256 + SPECIAL, 1 << 20))
    ]
    output: Annotated[Path, option("file to write; one that exists is kept", "FILE.json", check=_json_file)] = Path(
        "token_files/tokenizer.json"
    )
    pattern: Annotated[
        Literal["cl100k", "gpt2", "o200k"], option("splitting into words; three digits together, of gpt2 any number")
    ] = "cl100k"
    sample_bytes: Annotated[
        int, option("text to read at most; of more, evenly spread", "N", check=integer(1, LARGEST_SAMPLE))
    ] = 200_000_000
    text_field: Annotated[str, option("field of records", "NAME")] = TEXT_FIELD
    separator: Annotated[str | None, option("text between the documents", "TEXT", check=_separator)] = None
