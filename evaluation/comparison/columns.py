"""Table of the comparison: facts of the training runs, measured values, and published values beside them."""

from collections.abc import Callable

import attrs

from evaluation.comparison.rows import Row
from evaluation.shared.measure import EvaluationResult, Measure

NOT_COMPARED = "Published values have no interval: no model is ranked against them."
FACTS: dict[str, Callable[[Row], str]] = {  # columns before the measures
    "model": lambda row: row.label,
    "tokens": lambda row: f"{row.cost.tokens:,}" if row.cost else "",
    "hours": lambda row: f"{row.cost.hours:,.2f}" if row.cost else "",
    "dollars": lambda row: f"{row.cost.dollars:,.2f}" if row.cost and row.cost.dollars is not None else "",
    "validation loss": lambda row: "" if row.validation_loss is None else f"{row.validation_loss:.4f}",
}


@attrs.frozen(kw_only=True)
class Cell:
    """A cell of the table."""

    text: str = ""
    value: float | None = None
    bounds: tuple[float, float] | None = None  # of the 95 % interval that is drawn


@attrs.frozen(kw_only=True)
class Column:
    """A column: its heading, and a cell for each model."""

    name: str
    cells: list[Cell]
    measure: Measure | None = None


def measure_column(measure: Measure, results: list[EvaluationResult | None], marks: dict[str, str]) -> Column:
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


def published_rows(columns: list[Column], results: list[EvaluationResult]) -> tuple[list[list[Cell]], list[str]]:
    """Return a row for each published model with a value in some column, and notes on sources.

    `results`: those in the table that are on the data that most models share.
    """
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
