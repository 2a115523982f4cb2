"""A comparison as text: for a terminal, or as GitHub's markdown."""

import shutil
import textwrap

from evaluation.comparison.compare import Comparison

LABEL_WIDTH = 16  # of models above their columns; what is longer is wrapped


def as_text(comparison: Comparison) -> str:
    """Return the table, with a column for each model, statements and notes, as wide as the terminal at most."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    models = [
        [textwrap.fill(row[0].text, LABEL_WIDTH, break_on_hyphens=False), *(cell.text for cell in row[1:])]
        for row in comparison.rows
    ]
    lists = ("\n".join(_wrapped(line, width) for line in lines) for lines in (comparison.statements, comparison.notes))
    return "\n\n".join(part for part in (*_blocks(comparison.columns, models, width), *lists) if part)


def as_markdown(comparison: Comparison) -> str:
    """Return the same in GitHub's markdown."""
    rows = [[_literal(cell.text) for cell in row] for row in comparison.rows]
    lists = ("\n".join(f"- {_literal(line)}" for line in lines) for lines in (comparison.statements, comparison.notes))
    return "\n\n".join(part for part in (_table(comparison.columns, rows, "pipe"), *lists) if part)


def _blocks(names: list[str], models: list[list[str]], width: int) -> list[str]:
    """Return tables of as many models side by side as fit, of one at least. `models`: a label and values, each."""
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


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _table(columns: list[str], rows: list[list[str]], form: str) -> str:
    from tabulate import tabulate

    numbers = ["right"] * (len(columns) - 1)
    return tabulate(rows, columns, tablefmt=form, colalign=["left", *numbers], disable_numparse=True)


def _literal(text: str) -> str:
    """Return text that ends no cell and begins no tag."""
    for sign in "\\|<":
        text = text.replace(sign, f"\\{sign}")
    return text
