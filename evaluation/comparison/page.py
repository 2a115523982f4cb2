"""evaluate.py compare, and renderings of a comparison: text for a terminal, GitHub's Markdown, HTML for a report."""

import shutil
import textwrap
from typing import TYPE_CHECKING

from evaluation.command_line import CompareCommand, check_alone
from evaluation.comparison.compare import Comparison, compare
from evaluation.comparison.rows import read_rows

if TYPE_CHECKING:
    from markupsafe import Markup

LABEL_WIDTH = 16  # of models above their columns; longer labels are wrapped
BAR = {"width": 96, "height": 12, "margin": 4}  # of an interval, pixels


def run(command: CompareCommand) -> None:
    """Print stored results of models side by side; no model is loaded."""
    check_alone("compare")
    comparison = compare(read_rows(command.models), command.seed_deviation)
    print(as_markdown(comparison) if command.markdown else as_text(comparison))


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


def as_fragment(comparison: Comparison) -> "Markup":
    """Return table, statements and notes as a part of a page; intervals are drawn, on one scale for each column."""
    from common.web_page import render

    ends = [[end for cell in column for end in cell.bounds or ()] for column in zip(*comparison.rows, strict=True)]
    ranges = {at: (min(one), max(one)) for at, one in enumerate(ends) if one and min(one) < max(one)}
    return render("evaluation/comparison/comparison.html", comparison=comparison, ranges=ranges, **BAR)


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
