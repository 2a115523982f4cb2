"""A comparison as text: for a terminal, or as GitHub's markdown."""

import shutil
import textwrap

from evaluation.comparison.compare import Comparison


def as_text(comparison: Comparison) -> str:
    """Return the table, statements and notes for a terminal."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    table = _table(
        [name.replace(", ", ",\n") for name in comparison.columns],
        [[cell.text for cell in row] for row in comparison.rows],
        "simple",
    )
    notes = "\n".join(textwrap.fill(note, width, subsequent_indent="  ") for note in comparison.notes)
    return "\n\n".join(part for part in (table, "\n".join(comparison.statements), notes) if part)


def as_markdown(comparison: Comparison) -> str:
    """Return the same in GitHub's markdown."""
    rows = [[_literal(cell.text) for cell in row] for row in comparison.rows]
    lists = ("\n".join(f"- {_literal(line)}" for line in lines) for lines in (comparison.statements, comparison.notes))
    return "\n\n".join(part for part in (_table(comparison.columns, rows, "pipe"), *lists) if part)


def _table(columns: list[str], rows: list[list[str]], form: str) -> str:
    from tabulate import tabulate

    numbers = ["right"] * (len(columns) - 1)
    return tabulate(rows, columns, tablefmt=form, colalign=["left", *numbers], disable_numparse=True)


def _literal(text: str) -> str:
    """Return text that ends no cell and begins no tag."""
    for sign in "\\|<":
        text = text.replace(sign, f"\\{sign}")
    return text
