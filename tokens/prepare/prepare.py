"""Preparation of token files from sources: make a plan, compute units, commit them in order, and name the files."""

from collections.abc import Iterator
from pathlib import Path

import attrs

from common.errors import BadInput
from common.files import is_folder, open_locked, replace_file, writing
from common.output import note, progress, show
from common.text import quoted
from tokens.documents.inputs import Input
from tokens.documents.reader import Reader
from tokens.documents.sources import Source, resolve_sources
from tokens.documents.text_file import cut_positions
from tokens.format.manifest import MANIFEST, PLAN, RANKS_FILE, Manifest, read_finished
from tokens.prepare.bucket_output import IN_USE, BucketOutput
from tokens.prepare.command import PrepareCommand
from tokens.prepare.commit_log import COMMITS, CommitLog, read_log
from tokens.prepare.display import UnitProgress
from tokens.prepare.encode_unit import EncodeJob, Task, delete_own_files
from tokens.prepare.executors import Executor, Processes, RayCluster, in_order
from tokens.prepare.growing_files import LOCK, UNITS, partial_files
from tokens.prepare.plan import UnitPlan, check_same, make_plan, read_plan, settings_of, write_plan
from tokens.prepare.token_writer import TokenWriter, TooFewDocuments
from tokens.tokenizer.fast_encoder import write_recipe
from tokens.tokenizer.loading import CHARACTERS, load_tokenizer
from tokens.tokenizer.ranks import ranks_text
from tokens.tokenizer.template import load_template
from tokens.tokenizer.tokenizer import LibraryCoder, Tokenizer

# Lone white space between characters of several kinds, because tokenizers split text differently in such places
CUT_PROBE = "ab cd\tef\ngh 12\t34\n5 x. y, (z) \u4e2d \u6587 \u00e9\u00e8 's don't ! ? _ a1 2b"


def prepare(command: PrepareCommand) -> Manifest:
    """Write token files, or complete unfinished ones, and return their manifest.

    Raises BadInput or OSError. Units that were committed before the error are kept.
    """
    directory = command.directory.absolute()
    _check_output(command)
    template = None if command.template is None else load_template(command.template)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with open_locked(directory / LOCK, f"{directory}: {IN_USE}"):
        bucket = None if command.bucket is None else BucketOutput(command.bucket, directory)
        finished = read_finished(directory) if bucket is None else bucket.open()
        plan = read_plan(directory)
        sources = resolve_sources(command.sources, () if plan is None else plan.sources)
        tokenizer = _tokenizer_of(command, sources, plan)
        if template is not None:
            tokenizer = tokenizer.with_special_tokens(template.turn_tokens)
            if len(template.ends(tokenizer)) < 2:
                raise BadInput(
                    f"--template {command.template}: not every answer ends with a special token, so a model would not "
                    "learn to stop; add one to the template"
                )
        if template is None:
            check_cuts(tokenizer)
        settings = settings_of(command, tokenizer, template)
        if plan is None:
            _refuse_other_tokens(directory)
            if bucket is None:
                _refuse_other_ranks(directory / RANKS_FILE, tokenizer)
            plan = make_plan(sources, settings).recorded
            _write_ranks(tokenizer, directory)
            write_plan(directory, plan)
            if bucket is not None:
                bucket.begin()
        else:
            check_same(directory, plan, settings, sources)
        _delete_units(directory)
        if finished is not None:
            if bucket is None:
                read_log(directory)  # raises BadInput if the log is damaged
            else:
                bucket.delete_leftovers()
            show(progress(f"{command.output}: is already complete"))
            return finished
        # A worker whose coordinator was killed may still write to the folder.
        (directory / UNITS).mkdir(exist_ok=True)
        if bucket is not None:
            _write_ranks(tokenizer, directory)
            bucket.restore(plan)
        inputs = tuple(item for source in sources for item in source.inputs)  # with the secrets needed to read them
        manifest = _write(command, plan, inputs, tokenizer, bucket)
        _delete_units(directory)
        return manifest


def check_cuts(tokenizer: Tokenizer) -> None:
    """Raise BadInput for a tokenizer whose ids would depend on where a long text is cut.

    A text is cut before a lone white-space character. In some tokenizer.json files, the structure attaches this
    character to the word before it.
    """
    if not isinstance(tokenizer.coder, LibraryCoder):
        return
    begins = tokenizer.coder.begins(CUT_PROBE)
    if bad_positions := [
        position for position in cut_positions(CUT_PROBE, tokenizer.structure) if position not in begins
    ]:
        shown = quoted(CUT_PROBE[bad_positions[0] - 1 : bad_positions[0] + 2])
        raise BadInput(
            f"tokenizer {tokenizer.name}: its pre_tokenizer attaches the white space in {shown} to the character "
            "before it, which is not supported, because long texts are cut before white space; pass another --tokenizer"
        )


def _write_ranks(tokenizer: Tokenizer, directory: Path) -> None:
    if tokenizer.has_ranks_file:
        replace_file(directory / RANKS_FILE, ranks_text(tokenizer.coder.ranks), durable=True)


def _tokenizer_of(command: PrepareCommand, sources: list[Source], plan: UnitPlan | None) -> Tokenizer:
    """Return the tokenizer of a command, and download it if necessary.

    The vocabulary of `chars` consists of all characters in the documents.
    """
    if command.tokenizer != "chars":
        tokenizer = load_tokenizer(command.tokenizer)
        if tokenizer.surrounding_note is not None:
            show(tokenizer.surrounding_note)
        return tokenizer
    if plan is not None and plan.settings.tokenizer.startswith(CHARACTERS):
        return load_tokenizer(plan.settings.tokenizer)
    units = make_plan(sources, settings_of(command, load_tokenizer("bytes")))
    reader, characters = Reader(units.inputs, command.text_field, command.separator), set[str]()
    for piece in (piece for unit in units.units for piece in reader.read(unit)):
        characters.update(piece.text)
    count = len(characters)
    show(progress(f"vocabulary: {count:,} characters and the end of text, so vocab_size is {count + 1:,}"))
    return load_tokenizer(CHARACTERS + "".join(sorted(characters)))


def _write(
    command: PrepareCommand,
    plan: UnitPlan,
    inputs: tuple[Input, ...],
    tokenizer: Tokenizer,
    bucket: BucketOutput | None,
) -> Manifest:
    """Compute and commit the missing units; finish the token files and return their manifest."""
    directory = command.directory.absolute()
    log = CommitLog(directory, plan.fingerprint())
    writer = TokenWriter(directory, plan, directory / RANKS_FILE if tokenizer.has_ranks_file else None, log, bucket)
    try:
        if log.totals.units:
            show(progress(f"resuming after {log.totals.units:,} of {len(plan.units):,} units"))
        if log.totals.units < len(plan.units):
            _compute(command, plan, inputs, tokenizer, writer)
        if sum(log.totals.documents.values()) == log.totals.empty_documents:
            lost_documents, first = log.totals.lost_documents, next(iter(log.totals.examples.values()), [""])[0]
            unreadable = f"all documents in the sources are unreadable ({lost_documents:,}): {first}"
            raise TooFewDocuments(unreadable if lost_documents else "the sources contain no documents")
        manifest = writer.finish()
    except TooFewDocuments as error:
        if bucket is not None:
            bucket.discard()
        # Once these files are deleted, another command can start in this folder.
        for path in (*partial_files(directory), directory / COMMITS, directory / PLAN):
            path.unlink(missing_ok=True)
        ranks = directory / RANKS_FILE
        if tokenizer.has_ranks_file and not _is_same_file(ranks, Path(command.tokenizer)):
            ranks.unlink(missing_ok=True)
        _delete_units(directory)
        raise BadInput(f"{error}; nothing was written") from error
    finally:
        writer.close()
        log.close()
    if manifest.split is not None and manifest.split.from_tail:
        held_out = " or ".join(manifest.split.from_tail)
        reason = f"the hash selected no documents, or too few, for {held_out}"
        show(note(f"{reason}, so the last documents are held out, and train may contain copies of them"))
    if manifest.split is not None and manifest.split.shortened:
        held_out = " or ".join(manifest.split.shortened)
        reason = f"the hash selected too many documents for {held_out}, so the last of them were moved to train"
        show(note(f"{reason}; train may now contain copies of documents that are still held out"))
    return manifest


def _compute(
    command: PrepareCommand, plan: UnitPlan, inputs: tuple[Input, ...], tokenizer: Tokenizer, writer: TokenWriter
) -> None:
    directory, units = command.directory.absolute(), writer.units
    recipe, slow_noted = None, tokenizer.pattern is None or command.template is not None
    executor: Executor = Executor()
    if command.executor != "inline":
        executor = RayCluster(command.ray_address) if command.executor == "ray" else Processes(command.workers)
    progress = UnitProgress(plan, writer.totals)
    try:  # the workers start while the next lines run
        if not slow_noted:
            recipe = write_recipe(tokenizer, units / "recipe.json")
        record = plan.settings.tokenizer_record(directory / RANKS_FILE if tokenizer.has_ranks_file else None)
        job = EncodeJob(directory=units, settings=plan.settings, tokenizer=record, recipe=recipe)
        for results in in_order(executor, job, _tasks(plan, inputs, writer.totals.units)):
            if not slow_noted and not all(result.fast for result in results):
                slow_noted = True
                problem = "fastokens, which is several times faster, is not installed or gives different ids"
                show(note(f"encoding with tiktoken, because {problem}"))
            losses = [result for result in results if result.lost_documents or result.lost_bytes]
            if losses and command.on_bad_document == "fail":
                example = next(iter(losses[0].examples.values()))[0]
                raise BadInput(f"{example}; fix this, or pass --on-bad-document skip")
            writer.commit(results)
            progress.show(writer.totals)
    finally:
        executor.close()
        progress.close()


def _tasks(plan: UnitPlan, inputs: tuple[Input, ...], first: int) -> Iterator[Task]:
    for index in range(first, len(plan.units)):
        unit = plan.units[index]
        numbers = sorted({extent.input for extent in unit})
        extents = tuple(attrs.evolve(extent, input=numbers.index(extent.input)) for extent in unit)
        yield Task(index=index, extents=extents, inputs=tuple(inputs[number] for number in numbers))


def _check_output(command: PrepareCommand) -> None:
    """Raise BadInput if the output is a file, or if it is also a source."""
    directory = command.directory
    with writing(directory):
        if directory.exists() and not directory.is_dir():
            raise BadInput(f"{directory}: is not a folder; pass another --output")
        resolved = directory.resolve()
    if any(is_folder(Path(name)) and Path(name).resolve() == resolved for name in command.sources):
        raise BadInput(f"{directory}: is both a source and the output; pass another --output")


def _refuse_other_tokens(directory: Path) -> None:
    """Raise BadInput if a folder has tokens but no plan. Delete hidden files, which are of no use without a plan."""
    existing_files = [*directory.glob("[!.]*.safetensors"), *directory.glob(MANIFEST), *directory.glob(COMMITS)]
    if existing_files:
        raise BadInput(
            f"{existing_files[0]}: exists; pass another --output, or delete it to prepare these tokens again"
        )
    for path in partial_files(directory):
        size = path.lstat().st_size
        path.unlink()
        show(note(f"{path}: deleted {size:,} bytes of an unfinished preparation that has no {PLAN}"))


def _refuse_other_ranks(ranks: Path, tokenizer: Tokenizer) -> None:
    """Raise BadInput if the file for the tokenizer's ranks already exists and has different content.

    If the content is the same, the file is accepted: a killed command left it, or it is the user's --tokenizer.
    """
    is_file = tokenizer.has_ranks_file and ranks.is_file() and not ranks.is_symlink()
    if is_file and ranks.read_bytes() != ranks_text(tokenizer.coder.ranks):
        size = f"{ranks.stat().st_size:,} bytes"
        raise BadInput(
            f"{ranks}: exists, and its {size} are not the ranks of tokenizer {tokenizer.name}, so this file would "
            "be overwritten; pass another --output, or move the file away"
        )


def _is_same_file(first: Path, second: Path) -> bool:
    return first.exists() and second.exists() and first.samefile(second)


def _delete_units(directory: Path) -> None:
    """Delete computed units that were not committed, and the growing files of finished tokens.

    The units will be computed again.
    """
    for path in partial_files(directory) if (directory / MANIFEST).exists() else ():  # from packed conversations
        path.unlink()
    if (directory / UNITS).is_symlink():  # never write through a link with this name
        (directory / UNITS).unlink()
    delete_own_files(directory / UNITS)
