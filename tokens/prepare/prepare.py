"""From sources to token files: plan, compute, commit, name. The same command goes on after any interruption."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput
from common.files import replace_file, writing
from common.json_files import open_descriptor
from tokens.documents.sources import COMPRESSED_SUFFIXES, readable, resolve_sources
from tokens.format.manifest import MANIFEST, read_finished
from tokens.format.splits import HASH, SplitRule
from tokens.prepare.commit_log import LEDGER, CommitLog, Totals
from tokens.prepare.encode_unit import EncodeJob, Task
from tokens.prepare.executors import Executor, in_order
from tokens.prepare.growing_files import partial_files
from tokens.prepare.plan import PLAN, PrepareSettings, UnitPlan, check_same, make_plan, read_plan, write_plan
from tokens.prepare.s3_output import Bucket, scratch_of
from tokens.prepare.tail_split import TooFewDocuments, missing_splits
from tokens.prepare.writer import TokenWriter, WritePosition
from tokens.tokenizer.fast_encoder import has_fastokens, write_recipe
from tokens.tokenizer.tokenizer import RANKS_FILE, BytePairTokenizer, Tokenizer, fingerprint, load_tokenizer

UNITS, LOCK = ".units", ".lock"


@attrs.frozen(kw_only=True)
class PrepareRequest:
    """What a command asks for."""

    sources: list[str]
    directory: Path
    bucket: str | None  # an s3:// URL that the tokens go to; then `directory` is scratch
    tokenizer: str
    text_field: str
    rule: SplitRule
    unit_bytes: int
    shard_tokens: int | None  # of each file but the last; None: one file a split
    fail_on_bad_document: bool


@attrs.frozen(kw_only=True)
class Host:
    """Who computes the units, and who is told."""

    make_executor: Callable[[], Executor]
    say: Callable[[str], None]  # a line for people
    show: Callable[["PrepareProgress"], None]


@attrs.frozen(kw_only=True)
class PrepareProgress:
    """How far a preparation has come."""

    totals: Totals
    units: int  # of the plan
    done_bytes: int  # of input
    total_bytes: int


def prepare(request: PrepareRequest, host: Host) -> dict[str, Any]:
    """Write the token files that are asked for, or what is missing of them; return their manifest.

    Raises BadInput, and OSError when the disk is full; in either case what is committed stays.
    """
    directory = request.directory.absolute()
    tokenizer = load_tokenizer(request.tokenizer)
    _refuse_output(request)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory):
        bucket = None if request.bucket is None else Bucket(request.bucket, directory)
        finished = read_finished(directory) if bucket is None else bucket.open()
        plan = _begin(request, host, tokenizer, bucket)
        if (directory / UNITS).is_symlink():  # nothing is written through a link of that name
            (directory / UNITS).unlink()
        shutil.rmtree(directory / UNITS, ignore_errors=True)  # computed, not committed: computed again
        if finished is not None:
            if bucket is not None:
                bucket.tidy()
            host.say(f"{request.bucket or request.directory}: complete already")
            return finished
        _warn_of_large_units(plan, host)
        (directory / UNITS).mkdir(exist_ok=True)  # a worker of a coordinator that is gone may still write there
        if bucket is not None:
            assert request.shard_tokens is not None
            bucket.restore(request.shard_tokens)
        ledger = CommitLog(directory, plan.fingerprint())
        place = WritePosition(
            directory=directory, units=directory / UNITS, shard_tokens=request.shard_tokens, bucket=bucket
        )
        writer = TokenWriter(place, tokenizer, ledger)
        try:
            _compute(request, host, plan, tokenizer, writer)
            if sum(ledger.totals.documents.values()) == 0:
                _discard(directory, bucket)
                raise BadInput(f"{_nothing_found(ledger.totals)}; nothing was written")
            manifest = writer.finish(request.rule, _description(plan, ledger.totals, _from_tail(request, host, writer)))
        except TooFewDocuments as error:
            _discard(directory, bucket)  # so that a command that holds out otherwise may begin here
            raise BadInput(f"{error}; nothing was written") from error
        finally:
            writer.close()
            ledger.close()
        shutil.rmtree(directory / UNITS, ignore_errors=True)
        return manifest


def _begin(request: PrepareRequest, host: Host, tokenizer: Tokenizer, bucket: Bucket | None) -> UnitPlan:
    """Return the plan that is gone on with, when this command is the one that began it, or begin with a new one."""
    directory = request.directory.absolute()
    settings = PrepareSettings(
        text_field=request.text_field,
        tokenizer=request.tokenizer,
        fingerprint=fingerprint(tokenizer),
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text_id=tokenizer.end_of_text_id,
        split=request.rule.kind,
        split_seed=request.rule.seed,
        validation_fraction=request.rule.validation,
        test_fraction=request.rule.test,
        unit_bytes=request.unit_bytes,
        shard_tokens=request.shard_tokens,
    )
    plan = read_plan(directory)
    sources = resolve_sources(request.sources, () if plan is None else plan.sources, host.say)
    if plan is not None:
        check_same(directory, plan, settings, sources)
        return plan
    _refuse_other_tokens(directory)
    plan = make_plan(sources, settings)
    if tokenizer.ranks_file is not None:
        replace_file(directory / RANKS_FILE, tokenizer.ranks_file.read_bytes(), durable=True)
    write_plan(directory, plan)
    if bucket is not None:
        bucket.begin()
    return plan


def _compute(request: PrepareRequest, host: Host, plan: UnitPlan, tokenizer: Tokenizer, writer: TokenWriter) -> None:
    first = writer.totals.units
    if first:
        host.say(f"going on after {first:,} of {len(plan.units):,} units")
    if first == len(plan.units):
        return
    done, total = sum(plan.unit_bytes[:first]), sum(plan.unit_bytes)
    told = False

    def show() -> None:
        host.show(PrepareProgress(totals=writer.totals, units=len(plan.units), done_bytes=done, total_bytes=total))

    show()
    executor = host.make_executor()
    try:
        job = _job(request, plan, writer.directory / UNITS, tokenizer)  # while the workers start
        for results in in_order(executor, job, _tasks(plan, first), first):
            if isinstance(tokenizer, BytePairTokenizer) and not told and not all(result.fast for result in results):
                told = True
                host.say("NOTE: encoding with tiktoken: fastokens, several times faster, is not installed, or differs")
            for result in results:
                if request.fail_on_bad_document and (result.lost_documents or result.lost_bytes):
                    example = next(iter(result.examples.values()))[0]
                    raise BadInput(f"{example}; fix this, or pass --on-bad-document skip")
            writer.commit(results)
            done += sum(plan.unit_bytes[result.index] for result in results)
            show()
    finally:
        executor.close()


def _tasks(plan: UnitPlan, first: int) -> Iterator[Task]:
    inputs = plan.inputs
    for index in range(first, len(plan.units)):
        unit = plan.units[index]
        numbers = sorted({extent.input for extent in unit})
        extents = tuple(attrs.evolve(extent, input=numbers.index(extent.input)) for extent in unit)
        yield Task(index=index, extents=extents, inputs=tuple(inputs[number] for number in numbers))


def _description(plan: UnitPlan, totals: Totals, from_tail: list[str]) -> dict[str, Any]:
    """Return what the manifest tells beside the files."""
    return {
        "sources": [
            {"name": source.name, "files": len(source.inputs), "bytes": source.size_bytes} for source in plan.sources
        ],
        "split": {"kind": plan.settings.split, "seed": plan.settings.split_seed, "from_tail": from_tail},
        "units": totals.units,
        "plan": plan.fingerprint(),
        "problems": totals.problems,
        "lost_documents": totals.lost_documents,
        "lost_bytes": totals.lost_bytes,
        "examples": totals.examples,
    }


def _discard(directory: Path, bucket: Bucket | None) -> None:
    """Delete a preparation that came to nothing, so that a better command may begin another one here."""
    if bucket is not None:
        bucket.discard()
    for path in (*partial_files(directory), directory / LEDGER, directory / RANKS_FILE, directory / PLAN):
        path.unlink(missing_ok=True)
    shutil.rmtree(directory / UNITS)


def _nothing_found(totals: Totals) -> str:
    if not totals.lost_documents:
        return "the sources hold no document"
    first = next(iter(totals.examples.values()))[0]
    return f"none of the {totals.lost_documents:,} documents of the sources could be read: {first}"


def _from_tail(request: PrepareRequest, host: Host, writer: TokenWriter) -> list[str]:
    """Return the splits that no document's hash fell to, and that get the last documents."""
    if request.rule.kind != HASH or request.bucket is not None:
        return []
    splits = list(missing_splits(request.rule, writer.totals))
    if splits:
        host.say(
            f"NOTE: no document's hash fell to {' or '.join(splits)}: the last documents are held out, and copies of "
            "them may be in train"
        )
    return splits


def _refuse_output(request: PrepareRequest) -> None:
    """Raise BadInput for an output that is something else already."""
    with writing(request.directory):
        if request.directory.exists() and not request.directory.is_dir():
            raise BadInput(f"{request.directory}: is no folder; pass another --output")
        directory = request.directory.resolve()
    if any(_is_folder(name) and Path(name).resolve() == directory for name in request.sources):
        raise BadInput(f"{request.directory}: is a source and the output as well; pass another --output")
    if request.bucket is None and (url := scratch_of(directory)) is not None:
        raise BadInput(f"{request.directory}: is the --scratch of {url}; pass another --output")


def _is_folder(name: str) -> bool:
    with readable(name):
        return Path(name).is_dir()


def _refuse_other_tokens(directory: Path) -> None:
    taken = [*directory.glob("[!.]*.safetensors"), *directory.glob(MANIFEST), *directory.glob(LEDGER)]
    if taken:
        raise BadInput(f"{taken[0]}: exists; pass another --output, or delete it to prepare these tokens anew")
    for path in partial_files(directory):  # without a plan nobody goes on with them
        path.unlink()


def _warn_of_large_units(plan: UnitPlan, host: Host) -> None:
    large = [item for item in plan.inputs if item.path.endswith(COMPRESSED_SUFFIXES)]
    large = [item for item in large if item.size_bytes > 8 * plan.settings.unit_bytes]
    if large:
        host.say(
            f"NOTE: {large[0].path}{f' and {len(large) - 1} more files' if len(large) > 1 else ''}: compressed as a "
            "whole, so one worker reads each from end to end, and a kill loses all of it; Parquet or plain JSON lines "
            "go faster"
        )


def _job(request: PrepareRequest, plan: UnitPlan, units: Path, tokenizer: Tokenizer) -> EncodeJob:
    recipe = None
    if isinstance(tokenizer, BytePairTokenizer) and has_fastokens():
        recipe = write_recipe(tokenizer, units / "recipe.json")
    return EncodeJob(
        directory=units,
        text_field=request.text_field,
        tokenizer=request.tokenizer if tokenizer.ranks_file is None else str(tokenizer.ranks_file.absolute()),
        fingerprint=plan.settings.fingerprint,
        recipe=recipe,
        rule=request.rule,
    )


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    with writing(directory / LOCK):  # not waiting for the other end of a pipe
        descriptor = open_descriptor(directory / LOCK, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(descriptor, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{directory}: another process prepares these tokens; wait for it, or stop it") from None
        except OSError:  # a file system without locks
            pass
        yield
