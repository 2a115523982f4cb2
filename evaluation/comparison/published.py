"""Rows of published values, shown beside measured ones; they have no interval, so nothing is ranked by them."""

from evaluation.comparison.columns import Cell, Column
from evaluation.shared.measure import EvaluationResult

NOT_COMPARED = "Published values have no interval: no model is ranked against them."


def published_rows(columns: list[Column], results: list[EvaluationResult]) -> tuple[list[list[Cell]], list[str]]:
    """Return a row for each published model with a value in some column, and notes on sources.

    `results`: those in the table that are on the data that most models share.
    """
    values: dict[str, dict[str, str]] = {}  # by model and column
    sources: list[str] = []
    omitted: list[str] = []
    for column in columns:
        published = None if column.measure is None else column.measure.published
        if column.measure is None or published is None:
            continue
        measurements = [result.measurement(column.measure) for result in results]
        if not all(published.comparable(one.sample) for one in measurements if one is not None):
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
