"""Preparation of token files from sources: plan, compute units, commit them in order, name the files."""

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

# Lone white space between characters of several kinds, in which structures may split a text differently
CUT_PROBE = "ab cd\tef\ngh 12\t34\n5 x. y, (z) \u4e2d \u6587 \u00e9\u00e8 's don't ! ? _ a1 2b"


def prepare(command: PrepareCommand) -> Manifest:
    """Write token files, or complete them; return their manifest. Raises BadInput and OSError; committed units stay."""
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
                raise BadInput(f"--template {command.template}: no special token ends each answer; let one follow it")
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
                read_log(directory)  # raises BadInput for a damaged one
            else:
                bucket.delete_leftovers()
            show(progress(f"{command.output}: complete already"))
            return finished
        (directory / UNITS).mkdir(exist_ok=True)  # a worker of a coordinator that was killed may still write there
        if bucket is not None:
            _write_ranks(tokenizer, directory)
            bucket.restore(plan)
        inputs = tuple(item for source in sources for item in source.inputs)  # with the secrets that reading needs
        manifest = _write(command, plan, inputs, tokenizer, bucket)
        _delete_units(directory)
        return manifest


def check_cuts(tokenizer: Tokenizer) -> None:
    """Raise BadInput for a tokenizer whose ids would depend on where a long text is cut.

    A text is cut before a lone white space. Some structures of a tokenizer.json keep it with the word before.
    """
    if not isinstance(tokenizer.coder, LibraryCoder):
        return
    begins = tokenizer.coder.begins(CUT_PROBE)
    if wrong := [place for place in cut_positions(CUT_PROBE, tokenizer.structure) if place not in begins]:
        shown = quoted(CUT_PROBE[wrong[0] - 1 : wrong[0] + 2])
        raise BadInput(
            f"tokenizer {tokenizer.name}: its pre_tokenizer keeps the white space of {shown} with the character before "
            "it, but long texts are cut before white space: not implemented; pass another --tokenizer"
        )


def _write_ranks(tokenizer: Tokenizer, directory: Path) -> None:
    if tokenizer.has_ranks_file:
        replace_file(directory / RANKS_FILE, ranks_text(tokenizer.coder.ranks), durable=True)


def _tokenizer_of(command: PrepareCommand, sources: list[Source], plan: UnitPlan | None) -> Tokenizer:
    """Return the tokenizer of a command, which may be downloaded; `chars`: that of all characters of the documents."""
    if command.tokenizer != "chars":
        tokenizer = load_tokenizer(command.tokenizer)
        if tokenizer.surrounding_note is not None:
            show(tokenizer.surrounding_note)
        return tokenizer
    if plan is not None and plan.settings.tokenizer.startswith(CHARACTERS):
        return load_tokenizer(plan.settings.tokenizer)
    units = make_plan(sources, settings_of(command, load_tokenizer("bytes")))
    reader, found = Reader(units.inputs, command.text_field, command.separator), set[str]()
    for piece in (piece for unit in units.units for piece in reader.read(unit)):
        found.update(piece.text)
    show(progress(f"vocabulary: {len(found):,} characters, and the end of text: vocab_size {len(found) + 1:,}"))
    return load_tokenizer(CHARACTERS + "".join(sorted(found)))


def _write(
    command: PrepareCommand,
    plan: UnitPlan,
    inputs: tuple[Input, ...],
    tokenizer: Tokenizer,
    bucket: BucketOutput | None,
) -> Manifest:
    """Compute and commit the units that are missing; finish the token files and return their manifest."""
    directory = command.directory.absolute()
    log = CommitLog(directory, plan.fingerprint())
    writer = TokenWriter(directory, plan, directory / RANKS_FILE if tokenizer.has_ranks_file else None, log, bucket)
    try:
        if log.totals.units:
            show(progress(f"resuming after {log.totals.units:,} of {len(plan.units):,} units"))
        if log.totals.units < len(plan.units):
            _compute(command, plan, inputs, tokenizer, writer)
        if sum(log.totals.documents.values()) == log.totals.empty_documents:
            lost, first = log.totals.lost_documents, next(iter(log.totals.examples.values()), [""])[0]
            unread = f"none of the {lost:,} documents of the sources could be read: {first}"
            raise TooFewDocuments(unread if lost else "the sources hold no document")
        manifest = writer.finish()
    except TooFewDocuments as error:
        if bucket is not None:
            bucket.discard()
        # so that another command may begin here
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
        what = "no document's hash, or those of too few documents, fell to"
        show(note(f"{what} {held_out}: the last ones are held out, and copies may be in train"))
    if manifest.split is not None and manifest.split.shortened:
        held_out = " or ".join(manifest.split.shortened)
        what = "the hashes of too many documents fell to"
        show(note(f"{what} {held_out}: the last ones of these are at the end of train, and copies may be in both"))
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
    try:  # while the workers start
        if not slow_noted:
            recipe = write_recipe(tokenizer, units / "recipe.json")
        record = plan.settings.tokenizer_record(directory / RANKS_FILE if tokenizer.has_ranks_file else None)
        job = EncodeJob(directory=units, settings=plan.settings, tokenizer=record, recipe=recipe)
        for results in in_order(executor, job, _tasks(plan, inputs, writer.totals.units)):
            if not slow_noted and not all(result.fast for result in results):
                slow_noted = True
                show(note("encoding with tiktoken: fastokens, several times faster, is not installed, or differs"))
            lost = [result for result in results if result.lost_documents or result.lost_bytes]
            if lost and command.on_bad_document == "fail":
                example = next(iter(lost[0].examples.values()))[0]
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
    """Raise BadInput for an output that is a file, or a source."""
    directory = command.directory
    with writing(directory):
        if directory.exists() and not directory.is_dir():
            raise BadInput(f"{directory}: is no folder; pass another --output")
        resolved = directory.resolve()
    if any(is_folder(Path(name)) and Path(name).resolve() == resolved for name in command.sources):
        raise BadInput(f"{directory}: is a source and the output as well; pass another --output")


def _refuse_other_tokens(directory: Path) -> None:
    """Raise BadInput for a folder with tokens but without a plan; delete hidden files, which no plan can resume."""
    taken = [*directory.glob("[!.]*.safetensors"), *directory.glob(MANIFEST), *directory.glob(COMMITS)]
    if taken:
        raise BadInput(f"{taken[0]}: exists; pass another --output, or delete it to prepare these tokens anew")
    for path in partial_files(directory):
        size = path.lstat().st_size
        path.unlink()
        show(note(f"{path}: deleted: {size:,} bytes left by an unfinished preparation (there is no {PLAN})"))


def _refuse_other_ranks(ranks: Path, tokenizer: Tokenizer) -> None:
    """Raise BadInput for a file in the place of the tokenizer's ranks that holds anything else.

    The same content is accepted: a killed command has left it there, or the user has named it as the tokenizer.
    """
    is_file = tokenizer.has_ranks_file and ranks.is_file() and not ranks.is_symlink()
    if is_file and ranks.read_bytes() != ranks_text(tokenizer.coder.ranks):
        size = f"{ranks.stat().st_size:,} bytes"
        raise BadInput(
            f"{ranks}: exists, with {size} that are not the ranks of tokenizer {tokenizer.name}, which would replace "
            "them; pass another --output, or move the file away"
        )


def _is_same_file(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def _delete_units(directory: Path) -> None:
    """Delete computed units that were not committed: they are computed again; and growing files of finished tokens."""
    for path in partial_files(directory) if (directory / MANIFEST).exists() else ():  # packed conversations
        path.unlink()
    if (directory / UNITS).is_symlink():  # nothing is written through a link of that name
        (directory / UNITS).unlink()
    delete_own_files(directory / UNITS)
