"""A comparison as one page of HTML that needs nothing else: no script, no font, no network."""

from html import escape

from evaluation.comparison.compare import Comparison
from evaluation.comparison.measures import Cell

BAR_WIDTH, BAR_HEIGHT, MARGIN = 96, 12, 4  # pixels

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Models compared</title>
<style>
:root {{ color-scheme: light dark; --line: #d0d4da; --quiet: #5b6470; --mark: #1f6feb; }}
@media (prefers-color-scheme: dark) {{ :root {{ --line: #3a414b; --quiet: #9aa4b1; --mark: #6cb0ff; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; max-width: 90rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }}
th, td {{ padding: .4rem .8rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }}
th:first-child, td:first-child {{ text-align: left; }}
svg {{ display: block; margin-left: auto; }}
svg line {{ stroke: var(--mark); stroke-width: 2; }}
svg circle {{ fill: var(--mark); }}
.notes {{ color: var(--quiet); font-size: 13px; }}
</style>
</head>
<body>
<h1>Models compared</h1>
<div class="wide">
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>
{lists}
</body>
</html>
"""


def as_page(comparison: Comparison) -> str:
    """Return the page. Under a value with an interval the interval is drawn, on one scale for each column."""
    scales = [_scale(list(column)) for column in zip(*comparison.rows, strict=True)]
    body = "\n".join(
        "<tr>"
        + "".join(f"<td>{escape(cell.text)}{_bar(cell, scale)}</td>" for cell, scale in zip(row, scales, strict=True))
        + "</tr>"
        for row in comparison.rows
    )
    lists = "\n".join(
        f'<ul class="{name}">\n' + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "\n</ul>"
        for name, lines in (("statements", comparison.statements), ("notes", comparison.notes))
        if lines
    )
    return PAGE.format(head="".join(f"<th>{escape(name)}</th>" for name in comparison.columns), body=body, lists=lists)


def _scale(column: list[Cell]) -> tuple[float, float]:
    """Return the lowest and highest end of a column's intervals."""
    ends = [end for cell in column for end in (cell.low, cell.high) if end is not None]
    return (min(ends), max(ends)) if ends else (0.0, 0.0)


def _bar(cell: Cell, scale: tuple[float, float]) -> str:
    lowest, highest = scale
    if cell.value is None or cell.low is None or cell.high is None or lowest == highest:
        return ""
    reach = (BAR_WIDTH - 2 * MARGIN) / (highest - lowest)
    low, value, high = (MARGIN + reach * (end - lowest) for end in (cell.low, cell.value, cell.high))
    middle = BAR_HEIGHT / 2
    return (
        f'<svg width="{BAR_WIDTH}" height="{BAR_HEIGHT}" role="img" aria-label="95 % interval">'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>'
        f'<circle cx="{value:.1f}" cy="{middle}" r="3"/></svg>'
    )
