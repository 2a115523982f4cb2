"""Models side by side: what each of them scores, and which of them is better outside the noise.

Only results about the same tokens, items or questions are compared, recipe by recipe: evaluation/comparison/winners.py.
"""

from collections import Counter
from itertools import combinations

import attrs

from common.errors import BadInput, printable
from evaluation.comparison.harness_measures import harness_measures
from evaluation.comparison.measures import HELD_OUT, MEASURES, Cell, Measure, Result
from evaluation.comparison.published import published_rows
from evaluation.comparison.rows import Row
from evaluation.comparison.subjects import described, left_out, subject
from evaluation.comparison.winners import find_winners

SCOPE = (
    "Intervals are over text and questions, over fine-tuning seeds where there are several, and over random_seed of "
    "the training where its noise is known. A model stands for its recipe: recipes win, not one set of weights."
)
ADVICE = (
    "The seed noise is not known where no winner is named: train a run again with another random_seed and compare all, "
    "or state it: --seed-deviation NATS."
)


@attrs.frozen(kw_only=True)
class Comparison:
    """A table and what can be said of it."""

    columns: list[str]
    rows: list[list[Cell]]  # the first cell of each is the model
    statements: list[str]
    notes: list[str]


def compare(rows: list[Row], stated_deviation: float | None = None) -> Comparison:
    """Return the comparison of models. Raises BadInput where no two of several share an evaluation.

    `stated_deviation`: of the held-out loss over seeds of the training, nats a token; None: what the runs here show.
    """
    measures = [*MEASURES, *harness_measures([result for row in rows for result in row.results])]
    kinds = list(dict.fromkeys(measure.kind for measure in measures))
    shown = {kind: [_shown(row, kind, rows) for row in rows] for kind in kinds}
    shared = [kind for kind in kinds if any(_same(a, b) for a, b in combinations(shown[kind], 2))]
    if len(rows) > 1 and not shared:
        raise BadInput(
            f"{', '.join(row.label for row in rows)}: no overlap between result files: got no evaluation that two of "
            "them share on the same text or questions; measure them together: python evaluate.py loss MODEL MODEL"
        )
    marks, notes = _marks(shown)
    statements, noises, undecided = [], [], False
    for measure in measures:
        stated = stated_deviation if measure.name == HELD_OUT else None
        found = find_winners(measure, rows, shown[measure.kind], stated)
        statements += found.statements
        noises += found.notes
        undecided |= found.undecided
    if stated_deviation is not None:
        noises.append(f"Seed noise, {HELD_OUT}: standard deviation {stated_deviation:g}, as --seed-deviation states")
    columns, cells = _columns(measures, rows, shown, marks)
    losses = [result for result in shown["loss"] if result is not None and subject(result) not in marks]
    published, sources = published_rows(columns, losses)
    notes += [*_not_shown(rows, shown["judge"]), *sources, SCOPE, *noises, *([ADVICE] if undecided else [])]
    return Comparison(
        columns=list(map(printable, columns)),
        rows=[[attrs.evolve(cell, text=printable(cell.text)) for cell in row] for row in cells + published],
        statements=list(map(printable, statements)),
        notes=list(map(printable, notes)),
    )


def _shown(row: Row, kind: str, rows: list[Row]) -> Result | None:
    """Return a model's newest result about what most of the models have a result about; of such a judge's session from
    which the fewest prompts were left out, else the newest.
    """
    ranks: dict[str, tuple[int, int, str]] = {}
    for other in rows:
        newest = {subject(result): result for result in other.results if result["evaluation"] == kind}
        for key, result in newest.items():
            count, _, latest = ranks.get(key, (0, 0, ""))
            ranks[key] = count + 1, -left_out(result), max(latest, str(result.get("time")))
    mine = {subject(result): result for result in row.results if result["evaluation"] == kind}
    return mine[max(mine, key=lambda key: (ranks[key], key))] if mine else None


def _same(a: Result | None, b: Result | None) -> bool:
    return a is not None and b is not None and subject(a) == subject(b)


def _marks(shown: dict[str, list[Result | None]]) -> tuple[dict[str, str], list[str]]:
    """Return a footnote mark for each subject that is not the one most models share, and what all subjects are."""
    marks: dict[str, str] = {}
    notes = []
    for kind, results in shown.items():
        about = {subject(result): described(result) for result in results if result is not None}
        counts = Counter(subject(result) for result in results if result is not None)
        for number, (key, _) in enumerate(counts.most_common()):
            if number > 0:
                marks[key] = f"[{chr(ord('a') + len(marks) % 26)}]"
            only = f"{marks[key]} not comparable with the others: " if key in marks else ""
            notes.append(f"{only}{kind}: {about[key]}")
    return marks, notes


def _columns(
    measures: list[Measure], rows: list[Row], shown: dict[str, list[Result | None]], marks: dict[str, str]
) -> tuple[list[str], list[list[Cell]]]:
    """Return the columns that hold anything, and each model's cells."""
    table: dict[str, list[Cell]] = {"model": [Cell(text=row.label) for row in rows]}
    costs = [row.cost for row in rows]
    table["tokens"] = [Cell(text=f"{cost.tokens:,}" if cost else "") for cost in costs]
    table["hours"] = [Cell(text=f"{cost.hours:,.2f}" if cost else "") for cost in costs]
    table["dollars"] = [
        Cell(text=f"{cost.dollars:,.2f}" if cost and cost.dollars is not None else "") for cost in costs
    ]
    table["validation loss"] = [
        Cell(text="" if row.validation_loss is None else f"{row.validation_loss:.4f}") for row in rows
    ]
    for measure in measures:
        table[measure.name] = [_cell(measure, result, marks) for result in shown[measure.kind]]
    table = {name: cells for name, cells in table.items() if any(cell.text for cell in cells)}
    return list(table), [list(cells) for cells in zip(*table.values(), strict=True)]


def _cell(measure: Measure, result: Result | None, marks: dict[str, str]) -> Cell:
    if result is None:
        return Cell(text="")
    cell, mark = measure.read(result, measure.digits), marks.get(subject(result))
    # A mark stands apart: no interval is drawn on the scale of the others.
    return Cell(text=f"{cell.text} {mark}") if mark and cell.text else cell


def _not_shown(rows: list[Row], shown: list[Result | None]) -> list[str]:
    """Return a note for each newer session of a judge that is not shown because prompts were left out of it."""
    sessions = {
        (result["judge"], str(result.get("time"))): left_out(result)
        for row, chosen in zip(rows, shown, strict=True)
        for result in row.results
        if chosen is not None
        and result["evaluation"] == "judge"
        and left_out(result) > left_out(chosen)
        and str(result.get("time")) > str(chosen.get("time"))
    }
    return [
        f"judge: a newer session of {judge}, {time}, is not shown: {out:,} prompts were left out of it"
        for (judge, time), out in sessions.items()
    ]
