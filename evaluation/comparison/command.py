"""evaluate.py compare"""

import argparse
from pathlib import Path

from common.arguments import number
from evaluation.shared.command_line import check_alone

HELP = "compare stored results in one table, and name significant differences"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    what = "measured run, checkpoint or model directory, or OWNER/NAME on the hub"
    parser.add_argument("models", metavar="MODEL", nargs="+", help=what)
    parser.add_argument(
        "--seed-deviation",
        type=number(0, above=True, example="0.01"),
        metavar="NATS",
        help="standard deviation of the held-out loss over random_seed; default: estimated from runs of one recipe",
    )
    parser.add_argument("--markdown", action="store_true", help="print GitHub's Markdown")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page as well")


def run(arguments: argparse.Namespace) -> None:
    """Print stored results of models side by side; no model is loaded."""
    from common.files import replace_file, writing
    from evaluation.comparison.compare import compare
    from evaluation.comparison.page import as_markdown, as_page, as_text
    from evaluation.comparison.rows import read_rows

    check_alone("compare")
    comparison = compare(read_rows(arguments.models), arguments.seed_deviation)
    print(as_markdown(comparison) if arguments.markdown else as_text(comparison))
    if arguments.html is not None:
        with writing(f"--html {arguments.html}"):
            replace_file(arguments.html, as_page(comparison))
