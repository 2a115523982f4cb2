"""Models side by side: what each of them scores, and which of them is better outside the noise.

Only results about the same tokens, items or questions are compared, in pairs, with intervals that hold for all pairs of
a measure together. Where runs that differ in nothing but their seed are among the models, the noise of seeds that they
show is in the intervals as well.
"""

from collections import Counter
from itertools import combinations

import attrs

from errors import BadInput
from evaluation.comparison.measures import MEASURES, Cell, Measure, Result, decides, described, subject
from evaluation.comparison.published import GPJT_RANGE, POST, PUBLISHED, SOURCES
from evaluation.comparison.rows import Row
from evaluation.comparison.seed_noise import SeedNoise, seed_noise, widened
from evaluation.intervals import CONFIDENCE, Interval

SCOPE = (
    "Intervals are over text and questions, and over fine-tuning seeds where there are several; not over trainings: "
    "two that differ in nothing but random_seed differ too."
)
ADVICE = "By how much is not known here: train a run again with another random_seed and compare both."
NOT_COMPARED = "Published values have no interval: no model is called better or worse than them."


@attrs.frozen(kw_only=True)
class Comparison:
    """A table and what can be said of it."""

    columns: list[str]
    rows: list[list[Cell]]  # the first cell of each is the model
    statements: list[str]
    notes: list[str]


def compare(rows: list[Row]) -> Comparison:
    """Return the comparison of models. Raises BadInput where no two of several share an evaluation."""
    kinds = list(dict.fromkeys(measure.kind for measure in MEASURES))
    shown = {kind: [_shown(row, kind, rows) for row in rows] for kind in kinds}
    shared = [kind for kind in kinds if any(_same(a, b) for a, b in combinations(shown[kind], 2))]
    if len(rows) > 1 and not shared:
        raise BadInput(
            f"{', '.join(row.label for row in rows)}: no overlap between result files: got no evaluation that two of "
            "them share on the same text or questions; measure them together: python evaluate.py loss MODEL MODEL"
        )
    marks, notes = _marks(shown)
    statements, noises = [], []
    for measure in MEASURES:
        noise = seed_noise(measure, rows, shown[measure.kind])
        noises += [noise.text] if noise else []
        statements += _statements(measure, rows, shown[measure.kind], noise)
    columns, cells = _columns(rows, shown, marks)
    published, sources = _published(columns, shown["loss"])
    return Comparison(
        columns=columns,
        rows=cells + published,
        statements=statements,
        notes=[*notes, *sources, SCOPE, *(noises or [ADVICE])],
    )


def verdict(measure: Measure, labels: tuple[str, str], found: Interval, *, decisive: bool = True) -> str:
    """Return what an interval of the difference of two models says: one is better only where it leaves out zero.

    `decisive`: false where the interval does not cover what fine-tuning does by chance; nobody is better then.
    """
    one, other = labels
    if not decisive:
        return f"{one} and {other} are not told apart by one fine-tuning each: {_size(measure, found)}"
    if not found.apart:
        return f"{one} and {other} are not told apart: {_size(measure, found)}"
    if (found.value > 0) != (measure.sign > 0):
        one, other = other, one
    return f"{one} is better than {other} by {_size(measure, found if found.value > 0 else -found)}"


def _size(measure: Measure, found: Interval) -> str:
    value, digits = f"{found.value:.{measure.digits}f}", measure.digits
    if found.low is None or found.high is None:
        return f"{value} {measure.unit}, with no interval: too little was measured"
    return f"{value} [{found.low:.{digits}f}, {found.high:.{digits}f}] {measure.unit}"


def _shown(row: Row, kind: str, rows: list[Row]) -> Result | None:
    """Return a model's newest result about what most of the models have a result about, of such the newest."""
    ranks: dict[str, tuple[int, str]] = {}
    for other in rows:
        newest = {subject(result): str(result.get("time")) for result in other.results if result["evaluation"] == kind}
        for key, time in newest.items():
            count, latest = ranks.get(key, (0, ""))
            ranks[key] = count + 1, max(latest, time)
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
    rows: list[Row], shown: dict[str, list[Result | None]], marks: dict[str, str]
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
    for measure in MEASURES:
        table[measure.name] = [_cell(measure, result, marks) for result in shown[measure.kind]]
    table = {name: cells for name, cells in table.items() if any(cell.text for cell in cells)}
    return list(table), [list(cells) for cells in zip(*table.values(), strict=True)]


def _cell(measure: Measure, result: Result | None, marks: dict[str, str]) -> Cell:
    if result is None:
        return Cell(text="")
    cell, mark = measure.read(result, measure.digits), marks.get(subject(result))
    # A mark stands apart: no interval is drawn on the scale of the others.
    return Cell(text=f"{cell.text} {mark}") if mark and cell.text else cell


def _published(columns: list[str], losses: list[Result | None]) -> tuple[list[list[Cell]], list[str]]:
    """Return the rows of published models that have a value in some column, and where the values are from."""
    rows, used = [], set()
    for model in PUBLISHED:
        values = {name: entry for name, entry in model.values.items() if name in columns}
        if values:
            cells = {name: Cell(text=f"{text} [{source}]") for name, (text, source) in values.items()}
            rows.append([Cell(text=model.label), *(cells.get(name, Cell(text="")) for name in columns[1:])])
            used |= {source for _, source in values.values()}
    notes = [f"[{source}] {SOURCES[source]}" for source in sorted(used)]
    if POST in used:
        ranges = [result["range"] for result in losses if result is not None]
        same = bool(ranges) and all(span.get(key) == value for span in ranges for key, value in GPJT_RANGE.items())
        text = "the same tokens as here" if same else "not the text that is measured here"
        notes[0] += f"; {text}, and another judge's session"
    return rows, [*notes, NOT_COMPARED] if rows else []


def _statements(measure: Measure, rows: list[Row], results: list[Result | None], noise: SeedNoise | None) -> list[str]:
    """Return what can be said of each pair of models that have a result about the same."""
    pairs = [(a, b) for a, b in combinations(range(len(rows)), 2) if _same(results[a], results[b])]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(pairs))  # all of them together
    statements = []
    for a, b in pairs if measure.difference else []:
        one, other = results[a], results[b]
        assert one is not None and other is not None and measure.difference is not None
        found = measure.difference(one, other, confidence)
        if found is not None:
            found = widened(found, noise, confidence)
            said = verdict(measure, (rows[a].label, rows[b].label), found, decisive=decides(one))
            statements.append(f"{measure.name}: {said}")
    return statements
