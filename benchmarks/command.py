"""Command line of a benchmark: its `main`'s parameters are the options; importing this finds the repository's rooms."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from cyclopts import App, Parameter
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from common.installation import use_expandable_segments  # noqa: E402  # after the path to it

use_expandable_segments()  # as the scripts do; before torch is imported

from common.errors import BadInput  # noqa: E402
from model.config import GPT2_SIZES, ModelConfig  # noqa: E402

Size = Literal["tiny", "124M", "350M", "774M", "1.5B"]
TINY = ModelConfig(
    vocab_size=257, context_length=128, emb_dim=128, n_heads=4, n_layers=2, qkv_bias=True, tie_weights=True
)
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
BYTES = ("--tokenizer", "bytes", "--validation-fraction", "0.03", "--split", "tail")  # options of prepare_data.py


def run(main: Callable[..., None]) -> None:
    """Run a benchmark with the command line's options. A user error is one line, and exit status 1."""
    exit_on_signals()
    try:
        parser(main)()
    except BadInput as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def exit_on_signals() -> None:
    """Turn the first signal, such as the hangup of a lost connection, into SystemExit; ignore all later ones.

    Context managers then end the processes that the benchmark has started.
    """

    def leave(number: int, _: object) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in SIGNALS:
        if signal.getsignal(each) != signal.SIG_IGN:  # as nohup does
            signal.signal(each, leave)


def parser(main: Callable[..., None]) -> App:
    """Return the command line of a benchmark: its `main`'s parameters, and its file's docstring as help."""
    app = App(
        help=main.__globals__["__doc__"],
        help_format="plaintext",
        version_flags=[],
        default_parameter=Parameter(consume_multiple=True, negative=()),
    )
    app.default(main)
    return app


def call(script: str, *arguments: object, statuses: tuple[int, ...] = (0,)) -> int:
    """Run a script of the repository to its end; return its exit status. Raises BadInput for one not in `statuses`."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in statuses:
        raise BadInput(f"{script}: exit status {done.returncode}: {done.stderr[-4000:]}")
    return done.returncode


def config(size: Size) -> ModelConfig:
    """Return a network of GPT-2's shape and options."""
    return TINY if size == "tiny" else GPT2_SIZES[size]


def table(columns: list[str], rows: list[list[str]], form: str = "simple") -> str:
    """Return a table whose first column is text and the others are numbers."""
    right = ["right"] * (len(columns) - 1)
    return str(tabulate(rows, columns, form, colalign=["left", *right], disable_numparse=True))


def markdown_table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table of text in Markdown."""
    return str(tabulate(rows, columns, "github", disable_numparse=True))
