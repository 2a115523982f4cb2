"""evaluate.py compare: options and command."""

from typing import Annotated

import attrs

from common.arguments import option
from common.checks import number
from evaluation.command_line import Models, check_alone


@attrs.frozen(kw_only=True)
class CompareCommand:
    """Compare stored results in one table, and name significant differences."""

    models: Models = attrs.field(kw_only=False)
    seed_deviation: Annotated[
        float | None,
        option(
            "standard deviation of the held-out loss over random_seed; default: estimated from runs of one recipe",
            "NATS",
            check=number(0, above=True, example="0.01"),
        ),
    ] = None
    markdown: Annotated[bool, option("print GitHub's Markdown")] = False


def run(command: CompareCommand) -> None:
    """Print stored results of models side by side; no model is loaded."""
    from evaluation.comparison.compare import compare
    from evaluation.comparison.page import as_markdown, as_text
    from evaluation.comparison.rows import read_rows

    check_alone("compare")
    comparison = compare(read_rows(command.models), command.seed_deviation)
    print(as_markdown(comparison) if command.markdown else as_text(comparison))
