"""Preparation plan: units of work of a few megabytes each, which depend only on the inputs and settings.

The plan is stored next to the tokens. A later command, with any number of workers, either resumes the same preparation
or is refused.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

import attrs
import numpy as np

from common.checks import structured
from common.errors import BadInput, refusing
from common.files import replace_file, sha256
from common.json_files import parse_json, read_regular
from common.redaction import HIDDEN
from common.text import counted
from tokens.documents.inputs import COMPRESSED_SUFFIXES, TEXT_SUFFIXES, Damaged, Extent, Input, look_up, readable
from tokens.documents.parquet import check_column, group_bytes, open_parquet
from tokens.documents.sources import Source
from tokens.format.header import readable_tokens
from tokens.format.manifest import PLAN, RANKS_FILE, TokenizerRecord
from tokens.prepare.command import TEXT_FIELD, PrepareCommand
from tokens.tokenizer.loading import CHARACTERS, record_of
from tokens.tokenizer.template import Template
from tokens.tokenizer.tokenizer import Tokenizer, token_dtype

FORMAT = 1
LARGEST_PLAN_BYTES = 1 << 40  # limit for a plan file, which is large because it names every input
HASH, TAIL = "hash", "tail"
WHOLE_SUFFIXES = (*COMPRESSED_SUFFIXES, ".json")  # conversations in these files cannot be divided into several units
GROWING_WORD = np.dtype("<u4")  # a token of packed conversations in a growing file: its id and its weight
COUNTED = 31  # this bit of a word holds the token's weight
LARGEST_ID = (1 << COUNTED) - 1
# Fields of a tokenizer's record that are also fields of PrepareSettings
RECORDED = ("fingerprint", "vocabulary_size", "end_of_text_id", "pattern", "structure", "special_tokens", "template")
LARGEST_FACTOR = 2  # a split's share of the tokens must be within this factor of its requested share
# Version of the rules. Since version 2, empty documents are not assigned to splits, and numbers in file names are
# compared as numbers.
VERSION = 2


@attrs.frozen(kw_only=True)
class PrepareSettings:
    """Settings that, together with the inputs, determine every byte of the token files."""

    text_field: str
    tokenizer: str  # name or file as on the command line; the name of a character tokenizer includes its characters
    fingerprint: str  # identifies the tokenizer's ids; see tokens.tokenizer.tokenizer.fingerprint
    vocabulary_size: int
    end_of_text_id: int
    split: str  # HASH or TAIL
    split_seed: int
    validation_fraction: float
    test_fraction: float
    unit_bytes: int
    shard_tokens: int | None = None  # tokens per file, except in the last file
    separator: str | None = None  # text between the documents of a file or record
    version: int = 1  # version of the rules; see VERSION
    # The following fields are as in the manifest. Fields that are None are not part of the plan's fingerprint.
    pattern: str | None = None
    structure: str | None = None
    special_tokens: dict[str, int] | None = None
    template: str | None = None  # Jinja template of conversations; None for text
    context_length: int | None = None  # tokens per row of packed conversations; None for text

    @property
    def growing_dtype(self) -> np.dtype:
        """Type of the ids in growing files. With a template, their highest bit is the weight."""
        return self.dtype if self.template is None else GROWING_WORD

    @property
    def dtype(self) -> np.dtype:
        """Type of the ids in token files."""
        return token_dtype(self.vocabulary_size).newbyteorder("<")

    @property
    def splitting(self) -> str | None:
        """How the tokenizer splits a text: a pattern, or a structure that only the `tokenizers` library understands."""
        return self.structure or self.pattern

    @property
    def held_out(self) -> dict[str, float]:
        """Requested share of the documents for each held-out split."""
        shares = {"validation": self.validation_fraction, "test": self.test_fraction}
        return {split: share for split, share in shares.items() if share > 0}

    def short_splits(self, tokens: Mapping[str, int]) -> list[str]:
        """Return the held-out splits that have less than half of the requested tokens."""
        total = sum(tokens.values())
        return [split for split, share in self.held_out.items() if tokens[split] * LARGEST_FACTOR < share * total]

    def long_splits(self, tokens: Mapping[str, int]) -> list[str]:
        """Return the held-out splits that have more than twice the requested tokens.

        If train is left with less than half of its share, all held-out splits are returned.
        """
        total, held_out = sum(tokens.values()), self.held_out
        if tokens["train"] * LARGEST_FACTOR < (1 - sum(held_out.values())) * total:
            return list(held_out)
        return [split for split, share in held_out.items() if tokens[split] > LARGEST_FACTOR * share * total]

    def tokenizer_record(self, ranks: Path | None) -> TokenizerRecord:
        """Return the tokenizer's entry in the manifest. `ranks` is the file of byte-pair ranks next to the tokens."""
        characters = self.tokenizer.removeprefix(CHARACTERS) if self.tokenizer.startswith(CHARACTERS) else None
        return TokenizerRecord(
            name=Path(self.tokenizer).name if characters is None else "chars",
            characters=characters,
            ranks_file=None if ranks is None else RANKS_FILE,
            ranks_sha256=None if ranks is None else sha256(ranks),
            **{name: getattr(self, name) for name in RECORDED},
        )

    def splits_of(self, heads: Iterable[str]) -> np.ndarray | None:
        """Choose the split of each document by a hash of its first characters, and return its index in SPLITS.

        Returns None if all documents are in train.
        """
        if self.split == TAIL or not self.held_out:
            return None
        import xxhash

        heads = list(heads)
        hashes = np.array([xxhash.xxh3_64_intdigest(head.encode(), self.split_seed) for head in heads], np.uint64)
        positions = hashes / 2.0**64  # in 0 .. 1
        # The validation share begins at 0, and the test share comes after it, so a larger test share leaves the
        # validation split unchanged.
        held_out = np.where(positions < self.validation_fraction, 1, 2)
        is_text = np.array([head != "" for head in heads], bool)
        return np.where(is_text & (positions < self.validation_fraction + self.test_fraction), held_out, 0)


@attrs.frozen
class UnitPlan:
    """All units, in the order of their tokens."""

    settings: PrepareSettings
    sources: tuple[Source, ...]
    units: tuple[tuple[Extent, ...], ...]
    unit_bytes: tuple[int, ...]  # approximate bytes of input

    @property
    def inputs(self) -> tuple[Input, ...]:
        return tuple(item for source in self.sources for item in source.inputs)

    @property
    def recorded(self) -> "UnitPlan":
        """The plan without secrets in the URLs of its inputs. To read the inputs, use the URLs of the command."""
        return attrs.evolve(self, sources=tuple(source.recorded for source in self.sources))

    def fingerprint(self) -> str:
        """Return a sha256 of everything in the plan."""
        values = attrs.asdict(self)
        for name in ("pattern", "structure", "special_tokens", "template", "context_length"):  # not in older plans
            if values["settings"][name] is None:
                del values["settings"][name]
        if self.settings.version == 1:  # version 1 had neither field
            del values["settings"]["separator"], values["settings"]["version"]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def is_steady(settings: PrepareSettings, tokens: Mapping[str, int]) -> bool:
    """Return whether all splits have tokens, and the held-out splits need no tokens from the end of train.

    Once this is true, `train.py --follow` may read the train stream, so no tokens may be removed from that stream.
    """
    return all(tokens[split] for split in ("train", *settings.held_out)) and not settings.short_splits(tokens)


def settings_of(command: PrepareCommand, tokenizer: Tokenizer, template: Template | None = None) -> PrepareSettings:
    """Return a command's settings, which have the same names as its options."""
    record = record_of(tokenizer, ranks=False, template=None if template is None else template.text)
    recorded = {name: getattr(record, name) for name in RECORDED}
    names = [field.name for field in attrs.fields(PrepareSettings) if hasattr(command, field.name)]
    options = {name: getattr(command, name) for name in names}
    if record.characters is not None:
        recorded["tokenizer"] = CHARACTERS + record.characters
    return PrepareSettings(**options | recorded, version=VERSION)


def make_plan(sources: list[Source], settings: PrepareSettings) -> UnitPlan:
    """Divide the inputs into units of about `settings.unit_bytes`. Raises BadInput if an input cannot be read."""
    inputs = [item for source in sources for item in source.inputs]
    if settings.text_field != TEXT_FIELD and all(item.path.endswith(TEXT_SUFFIXES) for item in inputs):
        files = counted(len(inputs), "file")
        raise BadInput(
            f"--text-field {settings.text_field}: got {files} of text, which have no records; omit the option"
        )
    units: list[list[Extent]] = []
    sizes: list[int] = []
    with ThreadPoolExecutor(16) as threads:  # reading the footers of remote Parquet files takes a while
        for atoms in threads.map(lambda number: list(_atoms(number, inputs[number], settings)), range(len(inputs))):
            for extent, extent_bytes in atoms:
                if not units or sizes[-1] + extent_bytes > settings.unit_bytes:
                    units.append([])
                    sizes.append(0)
                unit = units[-1]
                if unit and unit[-1].input == extent.input and unit[-1].end == extent.begin:
                    unit[-1] = attrs.evolve(unit[-1], end=extent.end)
                else:
                    unit.append(extent)
                sizes[-1] += extent_bytes
    return UnitPlan(settings, tuple(sources), tuple(map(tuple, units)), tuple(sizes))


def write_plan(directory: Path, plan: UnitPlan) -> None:
    text = json.dumps({"format": FORMAT, "fingerprint": plan.fingerprint(), **attrs.asdict(plan)})
    replace_file(directory / PLAN, text, durable=True)


def read_plan(directory: Path) -> UnitPlan | None:
    """Return the plan of a token directory, or None if there is no plan. Raises BadInput if the plan is damaged."""
    path = directory / PLAN
    try:
        with readable_tokens(path), refusing(f"{path}: damaged", "start over in another --output"):
            values = parse_json(read_regular(path, LARGEST_PLAN_BYTES))
            fingerprint = str(values.pop("fingerprint", None))
            values.pop("format", None)
            plan = structured(values, UnitPlan)
            if plan.fingerprint() != fingerprint:
                raise ValueError(f"its content does not have the fingerprint {fingerprint[:12]}...")
    except FileNotFoundError:
        return None
    return plan


def check_same(directory: Path, plan: UnitPlan, settings: PrepareSettings, sources: list[Source]) -> None:
    """Raise BadInput for the first difference between a command and the plan that it would resume."""
    where = f"{directory / PLAN}: another command started this preparation"
    advice = "repeat that command, or pass another --output"
    if plan.settings.version != settings.version:
        raise BadInput(
            f"{directory / PLAN}: was written by an earlier version of prepare_data.py; pass another --output"
        )
    for field in attrs.fields(PrepareSettings):
        got, was = getattr(settings, field.name), getattr(plan.settings, field.name)
        if field.name == "split_seed" and settings.split == TAIL:
            continue  # a tail split needs no seed, but earlier versions accepted a seed
        if got != was:
            raise BadInput(f"{where}: {field.name}: got {got!s:.200}, wanted {was!s:.200}; {advice}")
    # Compare without secrets, because plans of earlier versions may contain passwords and signatures, and a signed URL
    # differs with each command.
    was_listed, now_listed = ([source.recorded.inputs for source in listed] for listed in (plan.sources, sources))
    was_inputs, now_inputs = ([item for inputs in listed for item in inputs] for listed in (was_listed, now_listed))
    was_paths, now_paths = ([item.path for item in inputs] for inputs in (was_inputs, now_inputs))
    planned_paths, current_paths = {*was_paths}, {*now_paths}
    for path in dict.fromkeys([*was_paths, *now_paths]):
        if path not in current_paths:
            if HIDDEN not in path:
                look_up(path)  # raises BadInput if the file is missing
            raise BadInput(f"{where}: {path} was among its sources, but is missing from yours; {advice}")
        if path not in planned_paths:
            raise BadInput(f"{where}: {path} is among your sources, but was not among its sources; {advice}")
    # Names of sources may differ: relative names depend on the current folder, and URLs may differ in their secrets.
    key = attrgetter("path")
    for was, now in zip(sorted(was_inputs, key=key), sorted(now_inputs, key=key), strict=False):
        if was.path == now.path:
            was.compare(now)
    if [[item.path for item in inputs] for inputs in was_listed] != [
        [item.path for item in inputs] for inputs in now_listed
    ]:
        raise BadInput(f"{where}: its sources were named differently, or in another order; {advice}")


def _atoms(number: int, item: Input, settings: PrepareSettings) -> Iterator[tuple[Extent, int]]:
    """Divide an input into parts that no unit divides further. Yield each part with its size in bytes."""
    if settings.template is not None and item.path.endswith(TEXT_SUFFIXES):
        raise BadInput(
            f"{item.path}: is text, but conversations are in .jsonl, .json or .parquet files; name these, or use a glob"
        )
    if not item.path.endswith(".parquet"):
        # A .json file of conversations may be a JSON array, which cannot be divided.
        is_indivisible = item.path.endswith(COMPRESSED_SUFFIXES if settings.template is None else WHOLE_SUFFIXES)
        count = 1 if is_indivisible else max(1, round(item.size_bytes / settings.unit_bytes))
        edges = [item.size_bytes * part // count for part in range(count + 1)]
        for begin, end in itertools.pairwise(edges):
            yield Extent(number, begin, end), end - begin
        return
    with item.open() as stream, readable(item.path):
        try:
            table = open_parquet(stream)
        except Damaged:
            table = None
        if table is None or table.metadata.num_rows == 0:
            yield Extent(number, 0, 0), item.size_bytes  # the unit will count the file as damaged or empty
            return
        name = settings.text_field if settings.template is None else None
        check_column(table, name, item.path)
        for group in range(table.metadata.num_row_groups):
            yield Extent(number, group, group + 1), group_bytes(table, group, name)
