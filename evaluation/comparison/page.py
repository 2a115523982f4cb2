"""Renderings of a comparison: text for a terminal, GitHub's Markdown, and a self-contained HTML page."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evaluation.comparison.columns import Cell
from evaluation.comparison.compare import Comparison

if TYPE_CHECKING:
    from jinja2 import Template

LABEL_WIDTH = 16  # of models above their columns; longer labels are wrapped
BAR_WIDTH, BAR_HEIGHT, MARGIN = 96, 12, 4  # pixels
SCALE_DIGITS = 4  # significant ones of the ends of a column's bars

HEADING = "<h1>Models compared</h1>"  # on every page
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Models compared</title>
<style>
:root { color-scheme: light dark; --line: #d0d4da; --quiet: #5b6470; --mark: #1f6feb; }
@media (prefers-color-scheme: dark) { :root { --line: #3a414b; --quiet: #9aa4b1; --mark: #6cb0ff; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; max-width: 90rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .4rem .8rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
svg { display: block; margin-left: auto; }
svg line { stroke: var(--mark); stroke-width: 2; }
svg circle { fill: var(--mark); }
.notes { color: var(--quiet); font-size: 13px; }
</style>
</head>
<body>
{{ heading }}
{{ comparison }}
</body>
</html>
"""

FRAGMENT = """<div class="wide">
<table>
<thead><tr>{% for name in comparison.columns %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell, bar in row %}<td>{{ cell.text }}
{%- if bar %}<svg width="{{ width }}" height="{{ height }}" role="img" aria-label="95 % interval">
{{- '' }}<line x1="{{ bar[0] }}" x2="{{ bar[2] }}" y1="{{ height / 2 }}" y2="{{ height / 2 }}"/>
{{- '' }}<circle cx="{{ bar[1] }}" cy="{{ height / 2 }}" r="3"/></svg>{% endif %}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
{% if scales|select|list %}
<tfoot><tr><td>range of the bars (95 % intervals)</td>
{%- for scale in scales[1:] %}<td>{{ scale }}</td>{% endfor %}</tr></tfoot>
{% endif %}
</table>
</div>
{% for name, lines in (("statements", comparison.statements), ("notes", comparison.notes)) if lines %}
<ul class="{{ name }}">
{% for line in lines %}
<li>{{ line }}</li>
{% endfor %}
</ul>
{% endfor %}
"""


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


def as_page(comparison: Comparison) -> str:
    """Return the HTML page: no script, font or network; intervals are drawn, on one scale for each column."""
    from markupsafe import Markup

    return _template(PAGE).render(heading=Markup(HEADING), comparison=Markup(as_fragment(comparison)))


def as_fragment(comparison: Comparison) -> str:
    """Return the table, statements and notes of the page, for another one."""
    ends = [[end for cell in column for end in cell.bounds or ()] for column in zip(*comparison.rows, strict=True)]
    rows = [[(cell, _bar(cell, scale)) for cell, scale in zip(row, ends, strict=True)] for row in comparison.rows]
    scales = [_scale(bounds, drawn) for bounds, drawn in zip(ends, zip(*rows, strict=True), strict=True)]
    return _template(FRAGMENT).render(
        comparison=comparison, rows=rows, scales=scales, width=BAR_WIDTH, height=BAR_HEIGHT
    )


def _template(source: str) -> "Template":
    import jinja2

    return jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined).from_string(source)


def _bar(cell: Cell, ends: list[float]) -> list[str] | None:
    """Return where a cell's interval is drawn, pixels: low, value, high. `ends`: all bounds of the column."""
    if cell.value is None or cell.bounds is None or min(ends) == max(ends):
        return None
    reach = (BAR_WIDTH - 2 * MARGIN) / (max(ends) - min(ends))
    return [f"{MARGIN + reach * (end - min(ends)):.1f}" for end in (cell.bounds[0], cell.value, cell.bounds[1])]


def _scale(ends: list[float], cells: Sequence[tuple[Cell, list[str] | None]]) -> str:
    """Return the values at the ends of a column's bars; "" where it has none."""
    return f"{min(ends):.{SCALE_DIGITS}g} to {max(ends):.{SCALE_DIGITS}g}" if any(bar for _, bar in cells) else ""


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
    from tabulate import tabulate

    numbers = ["right"] * (len(columns) - 1)
    return tabulate(rows, columns, tablefmt=form, colalign=["left", *numbers], disable_numparse=True)


def _escaped(text: str) -> str:
    for sign in "\\|<":
        text = text.replace(sign, f"\\{sign}")
    return text
