"""Compare models in a table of stored results, and state which recipes differ significantly."""

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
    "Intervals cover the choice of text and questions, the fine-tuning seeds if there are several, and random_seed if "
    "its noise is known. Differences are stated between recipes (all settings except the seed), not between single "
    "trained models."
)
BRACKETS = (
    "Brackets: the interval of a difference excludes zero if the difference is significant in Holm's procedure, at a "
    "level of 5% for all pairs of a measure together. Each interval covers its own difference with a probability of at "
    "least 95%; the probability that all intervals cover their differences is lower."
)
ADVICE = (
    "No winner is named if the seed noise is unknown. To measure it, train each recipe with two or more values of "
    "random_seed, the same values for all recipes, and compare all runs. If you know it, pass --seed-deviation NATS."
)
NOT_COMPARED = "Published values have no interval, so no model is ranked against them."
FACTS: dict[str, Callable[[Row], str]] = {  # the columns before the measures
    "model": lambda row: row.label,
    "tokens": lambda row: f"{row.cost.tokens:,}" if row.cost else "",
    "hours": lambda row: small_number(row.cost.hours) if row.cost else "",
    "dollars": lambda row: small_number(row.cost.dollars) if row.cost and row.cost.dollars is not None else "",
    "validation loss": lambda row: "" if row.validation_loss is None else f"{row.validation_loss:.4f}",
}
Shown = dict[str, list[EvaluationResult | None]]  # by evaluation: the result of each model, or None
LABEL_WIDTH = 16  # width of the models' labels above their columns; longer labels are wrapped
BAR = {"width": 96, "height": 12, "margin": 4}  # size of the drawing of an interval, in pixels


@attrs.frozen(kw_only=True)
class Cell:
    """A cell of the table."""

    text: str = ""
    value: float | None = None
    bounds: tuple[float, float] | None = None  # the 95% interval, which the page draws


@attrs.frozen(kw_only=True)
class Column:
    """A column of the table, with a cell for each model."""

    name: str
    cells: list[Cell]
    measure: Measure | None = None


@attrs.frozen(kw_only=True)
class Comparison:
    """A comparison that is ready to be rendered."""

    columns: list[str]
    rows: list[list[Cell]]  # a row for each model; the first cell is the model's label
    statements: list[str]
    notes: list[str]


def run(command: CompareCommand) -> None:
    """Print the comparison of all models that have results. If any model has none, raise BadInput at the end."""
    readable, problems = accepted(command.models, lambda model: (read_rows([model]), model)[1])
    if readable:
        comparison = compare(read_rows(readable), command.seed_deviation)
        show(*(as_markdown(comparison) if command.markdown else as_text(comparison)).split("\n"))
    if problems:
        raise BadInput(*problems)


def compare(rows: list[Row], stated_deviation: float | None = None) -> Comparison:
    """Return the comparison of models.

    Raises BadInput if there are several models, but no two have results on the same data.

    `stated_deviation`: the standard deviation of the held-out loss over training seeds, in nats, if the user stated it.
    """
    shown = {evaluation: _select_results(evaluation, rows) for evaluation in _evaluations(rows)}
    subjects_by_evaluation = [
        [result.subject for result in results if result is not None] for results in shown.values()
    ]
    if len(rows) > 1 and not any(len(set(subjects)) < len(subjects) for subjects in subjects_by_evaluation):
        raise BadInput(_no_overlap(rows))
    marks, notes = _footnotes(shown)
    columns = [Column(name=name, cells=[Cell(text=fact(row)) for row in rows]) for name, fact in FACTS.items()]
    statements, seed_notes = [], []
    for results in shown.values():
        measurements = (measurement for result in results if result for measurement in result.measurements)
        for measure in dict.fromkeys(measurement.measure for measurement in measurements):
            columns.append(_measure_column(measure, results, marks))
            new_statements, new_notes = find_winners(
                measure, rows, results, stated_deviation if measure == HELD_OUT else None
            )
            statements += new_statements
            seed_notes += new_notes
    if stated_deviation is not None:
        seed_notes.append(
            f"Seed noise, {HELD_OUT.name}: standard deviation {stated_deviation:g}, as stated by --seed-deviation"
        )
    columns = [column for column in columns if any(cell.text for cell in column.cells)]
    on_shared_data = [
        result for results in shown.values() for result in results if result and result.subject not in marks
    ]
    published, sources = _published_rows(columns, on_shared_data)
    scope = [SCOPE, BRACKETS] if any(statement.has_bounds for statement in statements) else [SCOPE]
    # A run whose settings were changed is a separate recipe, so the changes have to be shown.
    changes = [f"{row.label}: {change}" for row in rows for change in row.changes]
    weight_notes = [note for row in rows for note in row.notes] + _equal_weights(rows)
    advice = [ADVICE] if any(statement.needs_seeds for statement in statements) else []
    cells = [list(row) for row in zip(*(column.cells for column in columns), strict=True)]
    return Comparison(
        columns=[printable(column.name) for column in columns],
        rows=[[attrs.evolve(cell, text=printable(cell.text)) for cell in row] for row in cells + published],
        statements=[printable(statement.text) for statement in statements],
        notes=[printable(note) for note in (*notes, *weight_notes, *changes, *sources, *scope, *seed_notes, *advice)],
    )


def as_text(comparison: Comparison) -> str:
    """Return the comparison as text that fits the terminal's width. The table has a column for each model."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    models = [
        [textwrap.fill(row[0].text, LABEL_WIDTH, break_on_hyphens=False), *(cell.text for cell in row[1:])]
        for row in comparison.rows
    ]
    lists = ("\n".join(map(wrapper.fill, lines)) for lines in (comparison.statements, comparison.notes))
    return "\n\n".join(part for part in (*_side_by_side(comparison.columns, models, width), *lists) if part)


def as_markdown(comparison: Comparison) -> str:
    """Return the comparison in GitHub's Markdown. The table has a row for each model."""
    rows = [[_escape(cell.text) for cell in row] for row in comparison.rows]
    lists = ("\n".join(f"- {_escape(line)}" for line in lines) for lines in (comparison.statements, comparison.notes))
    return "\n\n".join(part for part in (_table(comparison.columns, rows, "pipe"), *lists) if part)


def as_fragment(comparison: Comparison) -> Markup:
    """Return the comparison as a part of an HTML page. The intervals of a column are drawn on a common scale."""
    ends = [[end for cell in column for end in cell.bounds or ()] for column in zip(*comparison.rows, strict=True)]
    ranges = {
        index: (min(column_ends), max(column_ends))
        for index, column_ends in enumerate(ends)
        if column_ends and min(column_ends) < max(column_ends)
    }
    return render("evaluation/comparison/comparison.html", comparison=comparison, ranges=ranges, **BAR)


def _no_overlap(rows: list[Row]) -> str:
    """Return the error message for models that have no results on the same data.

    The message includes a command that measures all of these models on the same data.
    """
    names = ", ".join(row.label for row in rows)
    # The command measures all models on the tokens of the first one. If the first model has the smallest vocabulary,
    # the other models know all of its ids, even if they have additional special tokens.
    smallest_first = sorted(rows, key=lambda row: row.vocabulary_size)
    models = [row.reference or str(row.home) for row in smallest_first]
    problem = f"{names}: no overlap: these models have no results on the same text"
    if len({row.tokenizer for row in rows} - {None}) > 1:  # the models cannot read the same tokens
        command = shlex.join(["python", "evaluate.py", "core", *models])
        return f"{problem}; their tokenizers differ, so measure them on the questions of CORE: {command}"
    return f"{problem}; measure them together: {shlex.join(['python', 'evaluate.py', 'loss', *models])}"


def _equal_weights(rows: list[Row]) -> list[str]:
    """Return a note for each pair of models with the same weights."""
    pairs = [
        (first, second)
        for first, second in combinations(rows, 2)
        if first.weights and first.weights.is_same(second.weights)
    ]
    return [f"{first.label} and {second.label} have the same weights, {first.weights}" for first, second in pairs]


def _evaluations(rows: list[Row]) -> list[str]:
    """Return the evaluations for which any model has a result, in the order of the commands."""
    commands = list(COMMANDS)
    evaluations = dict.fromkeys(result.evaluation for row in rows for result in row.results)
    return sorted(evaluations, key=lambda evaluation: commands.index(evaluation.partition(" ")[0]))


def _select_results(evaluation: str, rows: list[Row]) -> list[EvaluationResult | None]:
    """Return, for each model, the result of this evaluation that the table shows, or None if the model has none.

    Each model has a newest result for each data set that it was measured on. The table shows the result for the data
    set that most models were measured on. If several data sets tie, it shows the result that leaves out the fewest
    items. If there is still a tie, the data set with the latest measurement wins.
    """
    newest = [{result.subject: result for result in row.results if result.evaluation == evaluation} for row in rows]
    by_time = sorted(
        (result for by_subject in newest for result in by_subject.values()), key=lambda result: result.time
    )
    counts, latest = Counter(result.subject for result in by_time), {result.subject: result.time for result in by_time}

    def rank(result: EvaluationResult) -> tuple[int, int, str, str]:
        return counts[result.subject], -result.left_out, latest[result.subject], result.subject

    return [max(by_subject.values(), key=rank, default=None) for by_subject in newest]


def _footnotes(shown: Shown) -> tuple[dict[str, str], list[str]]:
    """Return footnote marks by subject (the data of a result), and a note for every subject.

    In each evaluation, the subject that most models share has no mark. Results on a marked subject are not comparable
    with results on the subject without a mark.
    """
    marks: dict[str, str] = {}
    notes = []
    for evaluation, results in shown.items():
        present = [result for result in results if result is not None]
        descriptions = {result.subject: result.description for result in present}
        for number, (subject, _) in enumerate(Counter(result.subject for result in present).most_common()):
            if number > 0:
                marks[subject] = f"[{chr(ord('a') + len(marks) % 26)}]"
            prefix = f"{marks[subject]} not comparable with the others: " if subject in marks else ""
            notes.append(f"{prefix}{evaluation}: {descriptions[subject]}")
    return marks, notes


def _measure_column(measure: Measure, results: list[EvaluationResult | None], marks: dict[str, str]) -> Column:
    """Return the column of a measure.

    `marks`: footnote marks by subject. Intervals of marked values are not drawn.
    """
    cells = []
    for result in results:
        measurement = None if result is None else result.measurement(measure)
        if result is None or measurement is None:
            cells.append(Cell())
        elif result.subject in marks:
            cells.append(Cell(text=f"{measurement.text} {marks[result.subject]}"))
        else:
            cells.append(Cell(text=measurement.text, value=measurement.value, bounds=measurement.bounds))
    return Column(name=measure.name, cells=cells, measure=measure)


def _published_rows(columns: list[Column], results: list[EvaluationResult]) -> tuple[list[list[Cell]], list[str]]:
    """Return a row for each published model, and notes about the sources.

    `results`: the results on the data that most models share. The published values of a measure are omitted unless all
    of these results were measured on the same data as the published values.
    """
    values: dict[str, dict[str, str]] = {}  # by model and column
    sources: list[str] = []
    omitted: list[str] = []
    for column in columns:
        if column.measure is None or column.measure.published is None:
            continue
        published = column.measure.published
        candidates = [result.measurement(column.measure) for result in results]
        measurements = [measurement for measurement in candidates if measurement is not None]
        if not all(published.comparable(measurement.sample) for measurement in measurements):
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


def _side_by_side(names: list[str], models: list[list[str]], width: int) -> list[str]:
    """Return tables with models side by side. Each table has as many models as fit into `width`, but at least one.

    `models`: for each model, its label and its values.
    """
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


def _escape(text: str) -> str:
    return re.sub(r"([\\|<])", r"\\\1", text)
