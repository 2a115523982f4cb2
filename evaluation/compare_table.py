"""A comparison as text: for a terminal, or as GitHub's markdown."""

import shutil
import textwrap

from evaluation.compare import Comparison


def as_text(comparison: Comparison) -> str:
    """Return the table, statements and notes for a terminal."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    parts = ["\n".join(comparison.statements)] if comparison.statements else []
    notes = "\n".join(textwrap.fill(note, width, subsequent_indent="  ") for note in comparison.notes)
    return "\n\n".join([_table(comparison, "simple"), *parts, notes])


def as_markdown(comparison: Comparison) -> str:
    """Return the same in GitHub's markdown."""
    lists = ("\n".join(f"- {line}" for line in lines) for lines in (comparison.statements, comparison.notes) if lines)
    return "\n\n".join([_table(comparison, "pipe"), *lists])


def _table(comparison: Comparison, form: str) -> str:
    from tabulate import tabulate

    return tabulate(
        [[cell.text.replace("|", "\\|") if form == "pipe" else cell.text for cell in row] for row in comparison.rows],
        headers=comparison.columns,
        tablefmt=form,
        colalign=["left"] + ["right"] * (len(comparison.columns) - 1),
        disable_numparse=True,
    )
