"""Comparison of models: a table of stored results, which recipes differ significantly, and renderings."""

import re
import shlex
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable
from itertools import combinations

import attrs
from markupsafe import Markup
from tabulate import tabulate

from common.errors import BadInput, accepted
from common.output import show
from common.text import printable, small_number
from common.web_page import render
from evaluation.command_line import COMMANDS, CompareCommand
from evaluation.comparison.rows import Row, read_rows
from evaluation.comparison.winners import find_winners
from evaluation.loss.loss_measures import HELD_OUT
from evaluation.shared.results import EvaluationResult, Measure

SCOPE = (
    "Intervals cover the sampling of text and questions, of fine-tuning seeds where there are several, and of "
    "random_seed where its noise is known. Differences are stated between recipes (settings without the seed), not "
    "between single trained models."
)
BRACKETS = (
    "Brackets: zero lies outside where Holm's procedure, at 5 % for all pairs of a measure together, finds a "
    "difference. Each covers its own difference with 95 % at least, all of them together less often."
)
ADVICE = (
    "No winner is named where the seed noise is unknown: train each recipe with two values of random_seed or more, the "
    "same ones, and compare all, or pass --seed-deviation NATS."
)
NOT_COMPARED = "Published values have no interval: no model is ranked against them."
FACTS: dict[str, Callable[[Row], str]] = {  # columns before those of the measures
    "model": lambda row: row.label,
    "tokens": lambda row: f"{row.cost.tokens:,}" if row.cost else "",
    "hours": lambda row: small_number(row.cost.hours) if row.cost else "",
    "dollars": lambda row: small_number(row.cost.dollars) if row.cost and row.cost.dollars is not None else "",
    "validation loss": lambda row: "" if row.validation_loss is None else f"{row.validation_loss:.4f}",
}
Shown = dict[str, list[EvaluationResult | None]]  # by evaluation, one result or None for each model
LABEL_WIDTH = 16  # of models above their columns; longer labels are wrapped
BAR = {"width": 96, "height": 12, "margin": 4}  # of an interval, pixels


@attrs.frozen(kw_only=True)
class Cell:
    text: str = ""
    value: float | None = None
    bounds: tuple[float, float] | None = None  # of the 95 % interval that is drawn


@attrs.frozen(kw_only=True)
class Column:
    name: str
    cells: list[Cell]
    measure: Measure | None = None


@attrs.frozen(kw_only=True)
class Comparison:
    columns: list[str]
    rows: list[list[Cell]]  # the first cell of each is the model
    statements: list[str]
    notes: list[str]


def run(command: CompareCommand) -> None:
    """Print the comparison of the models that have results. Raises BadInput, at the end for the others."""
    readable, problems = accepted(command.models, lambda model: (read_rows([model]), model)[1])
    if readable:
        comparison = compare(read_rows(readable), command.seed_deviation)
        show(*(as_markdown(comparison) if command.markdown else as_text(comparison)).split("\n"))
    if problems:
        raise BadInput(*problems)


def compare(rows: list[Row], stated_deviation: float | None = None) -> Comparison:
    """Return the comparison. `stated_deviation`: of the loss over seeds, nats. Raises BadInput without an overlap."""
    shown = {evaluation: _shown(evaluation, rows) for evaluation in _evaluations(rows)}
    subjects = [[result.subject for result in results if result is not None] for results in shown.values()]
    if len(rows) > 1 and not any(len(set(known)) < len(known) for known in subjects):
        raise BadInput(_no_overlap(rows))
    marks, notes = _marks(shown)
    columns = [Column(name=name, cells=[Cell(text=fact(row)) for row in rows]) for name, fact in FACTS.items()]
    statements, noises = [], []
    for results in shown.values():
        for measure in dict.fromkeys(one.measure for result in results if result for one in result.measurements):
            columns.append(_measure_column(measure, results, marks))
            found = find_winners(measure, rows, results, stated_deviation if measure == HELD_OUT else None)
            statements += found[0]
            noises += found[1]
    if stated_deviation is not None:
        noises.append(
            f"Seed noise, {HELD_OUT.name}: standard deviation {stated_deviation:g}, as --seed-deviation states"
        )
    columns = [column for column in columns if any(cell.text for cell in column.cells)]
    on_shared_data = [one for results in shown.values() for one in results if one and one.subject not in marks]
    published, sources = _published_rows(columns, on_shared_data)
    scope = [SCOPE, BRACKETS] if any(statement.has_bounds for statement in statements) else [SCOPE]
    changes = [f"{row.label}: {change}" for row in rows for change in row.changes]  # each makes it another recipe
    weights = [note for row in rows for note in row.notes] + _equal_weights(rows)
    advice = [ADVICE] if any(statement.needs_seeds for statement in statements) else []
    cells = [list(row) for row in zip(*(column.cells for column in columns), strict=True)]
    return Comparison(
        columns=[printable(column.name) for column in columns],
        rows=[[attrs.evolve(cell, text=printable(cell.text)) for cell in row] for row in cells + published],
        statements=[printable(statement.text) for statement in statements],
        notes=[printable(note) for note in (*notes, *weights, *changes, *sources, *scope, *noises, *advice)],
    )


def as_text(comparison: Comparison) -> str:
    """Return the table, with a column for each model, statements and notes, as wide as the terminal at most."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    models = [
        [textwrap.fill(row[0].text, LABEL_WIDTH, break_on_hyphens=False), *(cell.text for cell in row[1:])]
        for row in comparison.rows
    ]
    lists = ("\n".join(map(wrapper.fill, lines)) for lines in (comparison.statements, comparison.notes))
    return "\n\n".join(part for part in (*_blocks(comparison.columns, models, width), *lists) if part)


def as_markdown(comparison: Comparison) -> str:
    """Return the same in GitHub's Markdown, with a row for each model."""
    rows = [[_escaped(cell.text) for cell in row] for row in comparison.rows]
    lists = ("\n".join(f"- {_escaped(line)}" for line in lines) for lines in (comparison.statements, comparison.notes))
    return "\n\n".join(part for part in (_table(comparison.columns, rows, "pipe"), *lists) if part)


def as_fragment(comparison: Comparison) -> Markup:
    """Return table, statements and notes as a part of a page; intervals are drawn, on one scale for each column."""
    ends = [[end for cell in column for end in cell.bounds or ()] for column in zip(*comparison.rows, strict=True)]
    ranges = {at: (min(one), max(one)) for at, one in enumerate(ends) if one and min(one) < max(one)}
    return render("evaluation/comparison/comparison.html", comparison=comparison, ranges=ranges, **BAR)


def _no_overlap(rows: list[Row]) -> str:
    """Return that models share no measured text, and the command that measures all of them on one."""
    names = ", ".join(row.label for row in rows)
    # The tokens of the first model are measured: one that has special tokens besides knows the ids of the others.
    smallest_first = sorted(rows, key=lambda row: row.vocabulary_size)
    models = [row.reference or str(row.home) for row in smallest_first]
    problem = f"{names}: no overlap between result files on one text"
    if len({row.tokenizer for row in rows} - {None}) > 1:  # no range of tokens is of all of them
        command = shlex.join(["python", "evaluate.py", "core", *models])
        return f"{problem}; their tokenizers differ, so measure them on the questions of CORE: {command}"
    return f"{problem}; measure them together: {shlex.join(['python', 'evaluate.py', 'loss', *models])}"


def _equal_weights(rows: list[Row]) -> list[str]:
    """Return a note for each model that has the same weights as one before it, whatever their names."""
    pairs = [(one, other) for one, other in combinations(rows, 2) if one.weights and one.weights.is_same(other.weights)]
    return [f"{one.label} and {other.label} have the same weights, {one.weights}" for one, other in pairs]


def _evaluations(rows: list[Row]) -> list[str]:
    """Return the measures on which any of the models has a result, in the order of the commands."""
    commands = list(COMMANDS)
    found = dict.fromkeys(result.evaluation for row in rows for result in row.results)
    return sorted(found, key=lambda evaluation: commands.index(evaluation.partition(" ")[0]))


def _shown(evaluation: str, rows: list[Row]) -> list[EvaluationResult | None]:
    """Return each model's newest result on the most common data; of equally common, the least left out, newest."""
    newest = [{one.subject: one for one in row.results if one.evaluation == evaluation} for row in rows]
    by_time = sorted((one for found in newest for one in found.values()), key=lambda one: one.time)
    counts, latest = Counter(one.subject for one in by_time), {one.subject: one.time for one in by_time}

    def rank(one: EvaluationResult) -> tuple[int, int, str, str]:
        return counts[one.subject], -one.left_out, latest[one.subject], one.subject

    return [max(found.values(), key=rank, default=None) for found in newest]


def _marks(shown: Shown) -> tuple[dict[str, str], list[str]]:
    """Return a footnote mark for each subject but the one that most models share, and a note for every subject."""
    marks: dict[str, str] = {}
    notes = []
    for evaluation, results in shown.items():
        known = [result for result in results if result is not None]
        descriptions = {result.subject: result.description for result in known}
        for number, (subject, _) in enumerate(Counter(result.subject for result in known).most_common()):
            if number > 0:
                marks[subject] = f"[{chr(ord('a') + len(marks) % 26)}]"
            only = f"{marks[subject]} not comparable with the others: " if subject in marks else ""
            notes.append(f"{only}{evaluation}: {descriptions[subject]}")
    return marks, notes


def _measure_column(measure: Measure, results: list[EvaluationResult | None], marks: dict[str, str]) -> Column:
    """Return a measure's measurements. `marks`: footnote marks, by subject; values on other data are not drawn."""
    cells = []
    for result in results:
        measured = None if result is None else result.measurement(measure)
        if result is None or measured is None:
            cells.append(Cell())
        elif result.subject in marks:
            cells.append(Cell(text=f"{measured.text} {marks[result.subject]}"))
        else:
            cells.append(Cell(text=measured.text, value=measured.value, bounds=measured.bounds))
    return Column(name=measure.name, cells=cells, measure=measure)


def _published_rows(columns: list[Column], results: list[EvaluationResult]) -> tuple[list[list[Cell]], list[str]]:
    """Return a row for each published model, and notes on sources. `results`: those on the data most models share."""
    values: dict[str, dict[str, str]] = {}  # by model and column
    sources: list[str] = []
    omitted: list[str] = []
    for column in columns:
        if column.measure is None or column.measure.published is None:
            continue
        published = column.measure.published
        measurements = [one for result in results if (one := result.measurement(column.measure)) is not None]
        if not all(published.comparable(one.sample) for one in measurements):
            omitted += [published.otherwise] if published.otherwise is not None else []
            continue
        sources += [] if published.source in sources else [published.source]
        for model, value in published.values.items():
            values.setdefault(model, {})[column.name] = f"{value} [{sources.index(published.source) + 1}]"
    rows = [
        [Cell(text=f"{model}, published"), *(Cell(text=texts.get(column.name, "")) for column in columns[1:])]
        for model, texts in values.items()
    ]
    notes = [*(f"[{number}] {source}" for number, source in enumerate(sources, 1)), *omitted]
    return rows, [*notes, NOT_COMPARED] if rows else notes


def _blocks(names: list[str], models: list[list[str]], width: int) -> list[str]:
    """Return tables of as many models side by side as fit, one at least. `models`: a label and values, each."""
    blocks = []
    while models:
        for count in range(len(models), 0, -1):
            heads, *rows = zip(["", *names[1:]], *models[:count], strict=True)
            block = _table(list(heads), [list(row) for row in rows], "simple")
            if max(map(len, block.splitlines())) <= width:
                break
        blocks.append(block)
        models = models[count:]
    return blocks


def _table(columns: list[str], rows: list[list[str]], form: str) -> str:
    numbers = ["right"] * (len(columns) - 1)
    return tabulate(rows, columns, tablefmt=form, colalign=["left", *numbers], disable_numparse=True)


def _escaped(text: str) -> str:
    return re.sub(r"([\\|<])", r"\\\1", text)
