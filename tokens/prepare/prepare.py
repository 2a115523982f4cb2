"""Preparation of token files from sources: plan, compute units, commit them in order, name the files.

The same command resumes after any interruption.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from common.errors import BadInput
from common.files import replace_file, writing
from tokens.documents.inputs import COMPRESSED_SUFFIXES
from tokens.documents.sources import resolve_sources
from tokens.format.contents import read_finished
from tokens.format.manifest import Manifest
from tokens.format.splits import SplitRule
from tokens.prepare.commit_log import CommitLog, Totals, read_log
from tokens.prepare.encode_unit import EncodeJob, Task
from tokens.prepare.executors import Executor, in_order
from tokens.prepare.output_folder import UNITS, check_output, delete_units, discard, locked, refuse_other_tokens
from tokens.prepare.plan import PrepareSettings, UnitPlan, check_same, make_plan, read_plan, write_plan
from tokens.prepare.s3_output import S3Output
from tokens.prepare.tail_split import TooFewDocuments
from tokens.prepare.writer import TokenWriter
from tokens.tokenizer.fast_encoder import has_fastokens, write_recipe
from tokens.tokenizer.tokenizer import RANKS_FILE, BytePairTokenizer, Tokenizer, fingerprint, load_tokenizer

LARGE_UNITS = 8  # times --unit-bytes, of a compressed file, which is one unit


@attrs.frozen(kw_only=True)
class PrepareRequest:
    """Options of a preparation."""

    sources: list[str]
    directory: Path
    bucket: str | None  # s3:// URL of the output; then `directory` is scratch
    tokenizer: str
    text_field: str
    rule: SplitRule
    unit_bytes: int
    shard_tokens: int | None  # of each file but the last; None: one file a split
    fail_on_bad_document: bool


@attrs.frozen(kw_only=True)
class PrepareProgress:
    """Progress of a preparation."""

    totals: Totals
    units: int  # of the plan
    done_bytes: int  # of input
    total_bytes: int


@attrs.frozen(kw_only=True)
class Host:
    """Executor and display of a preparation."""

    make_executor: Callable[[], Executor]
    say: Callable[[str], None]  # prints a line
    show: Callable[[PrepareProgress], None]


def prepare(request: PrepareRequest, host: Host) -> Manifest:
    """Write token files, or complete them; return their manifest.

    Raises BadInput, and OSError when the disk is full; in either case what is committed stays.
    """
    directory = request.directory.absolute()
    tokenizer = load_tokenizer(request.tokenizer)
    check_output(request.directory, request.sources, is_scratch=request.bucket is not None)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        bucket = None if request.bucket is None else S3Output(request.bucket, directory)
        finished = read_finished(directory) if bucket is None else bucket.open()
        plan = _plan(request, host, tokenizer, bucket)
        delete_units(directory)
        if finished is not None:
            if bucket is None:
                read_log(directory)  # raises BadInput for a damaged one
            else:
                bucket.tidy()
            host.say(f"{request.bucket or request.directory}: complete already")
            return finished
        _warn_of_large_units(plan, host)
        (directory / UNITS).mkdir(exist_ok=True)  # a worker of a coordinator that was killed may still write there
        if bucket is not None:
            assert request.shard_tokens is not None
            bucket.restore(request.shard_tokens)
        manifest = _write(request, host, plan, tokenizer, bucket)
        delete_units(directory)
        return manifest


def _plan(request: PrepareRequest, host: Host, tokenizer: Tokenizer, bucket: S3Output | None) -> UnitPlan:
    """Return the plan of the output, if this is the command that began it, or make and keep a new one."""
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
    refuse_other_tokens(directory)
    plan = make_plan(sources, settings)
    if tokenizer.ranks_file is not None:
        replace_file(directory / RANKS_FILE, tokenizer.ranks_file.read_bytes(), durable=True)
    write_plan(directory, plan)
    if bucket is not None:
        bucket.begin()
    return plan


def _write(
    request: PrepareRequest, host: Host, plan: UnitPlan, tokenizer: Tokenizer, bucket: S3Output | None
) -> Manifest:
    """Compute and commit the units that are missing; finish the token files and return their manifest."""
    directory = request.directory.absolute()
    log = CommitLog(directory, plan.fingerprint())
    writer = TokenWriter(directory, plan, tokenizer, log, bucket)
    try:
        _compute(request, host, plan, tokenizer, writer)
        if sum(writer.totals.documents.values()) == 0:
            raise TooFewDocuments(_no_document(writer.totals))
        manifest = writer.finish(request.rule)
    except TooFewDocuments as error:
        if bucket is not None:
            bucket.discard()
        discard(directory)
        raise BadInput(f"{error}; nothing was written") from error
    finally:
        writer.close()
        log.close()
    if manifest.split is not None and manifest.split.from_tail:
        host.say(
            f"NOTE: no document's hash fell to {' or '.join(manifest.split.from_tail)}: the last documents are held "
            "out, and copies of them may be in train"
        )
    return manifest


def _compute(request: PrepareRequest, host: Host, plan: UnitPlan, tokenizer: Tokenizer, writer: TokenWriter) -> None:
    first = writer.totals.units
    if first:
        host.say(f"resuming after {first:,} of {len(plan.units):,} units")
    if first == len(plan.units):
        return
    done, total = sum(plan.unit_bytes[:first]), sum(plan.unit_bytes)
    slow_noted = not isinstance(tokenizer, BytePairTokenizer)

    def show() -> None:
        host.show(PrepareProgress(totals=writer.totals, units=len(plan.units), done_bytes=done, total_bytes=total))

    show()
    executor = host.make_executor()
    try:
        job = _job(request, plan, writer.units, tokenizer)  # while the workers start
        for results in in_order(executor, job, _tasks(plan, first), first):
            if not slow_noted and not all(result.fast for result in results):
                slow_noted = True
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


def _no_document(totals: Totals) -> str:
    if not totals.lost_documents:
        return "the sources hold no document"
    first = next(iter(totals.examples.values()))[0]
    return f"none of the {totals.lost_documents:,} documents of the sources could be read: {first}"


def _warn_of_large_units(plan: UnitPlan, host: Host) -> None:
    large = [item for item in plan.inputs if item.path.endswith(COMPRESSED_SUFFIXES)]
    large = [item for item in large if item.size_bytes > LARGE_UNITS * plan.settings.unit_bytes]
    if large:
        host.say(
            f"NOTE: {large[0].path}{f' and {len(large) - 1} more files' if len(large) > 1 else ''}: compressed as a "
            "whole, so one worker reads each from end to end, and a kill loses all of it; Parquet or plain JSON lines "
            "go faster"
        )
