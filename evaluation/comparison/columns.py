"""Columns of the comparison table: facts of the training run, then one for each measure."""

from collections.abc import Callable

import attrs

from evaluation.comparison.rows import Row
from evaluation.shared.measure import EvaluationResult, Measure


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


def model_columns(rows: list[Row]) -> list[Column]:
    """Return each model's label, cost of training, and validation loss."""
    facts: dict[str, Callable[[Row], str]] = {
        "model": lambda row: row.label,
        "tokens": lambda row: f"{row.cost.tokens:,}" if row.cost else "",
        "hours": lambda row: f"{row.cost.hours:,.2f}" if row.cost else "",
        "dollars": lambda row: f"{row.cost.dollars:,.2f}" if row.cost and row.cost.dollars is not None else "",
        "validation loss": lambda row: "" if row.validation_loss is None else f"{row.validation_loss:.4f}",
    }
    return [Column(name=name, cells=[Cell(text=fact(row)) for row in rows]) for name, fact in facts.items()]


def measure_column(measure: Measure, results: list[EvaluationResult | None], marks: dict[str, str]) -> Column:
    """Return a measure's measurements. `marks`: footnote marks, by subject."""
    cells = [Cell() if result is None else _cell(measure, result, marks.get(result.subject)) for result in results]
    return Column(name=measure.name, cells=cells, measure=measure)


def _cell(measure: Measure, result: EvaluationResult, mark: str | None) -> Cell:
    measured = result.measurement(measure)
    if measured is None:
        return Cell()
    if mark is not None:  # on other data: not drawn on the scale of the others
        return Cell(text=f"{measured.text} {mark}")
    return Cell(text=measured.text, value=measured.value, bounds=measured.bounds)
