"""Installation check and CUDA allocator setting: the first call of every script, before torch is imported."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, BadInput

# What training imports.
PACKAGES = ("attrs", "cattrs", "cyclopts", "jaxtyping", "matplotlib", "numpy", "safetensors", "torch", "tqdm")
# Names of one setting: since torch 2.9, and before.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def begin(script: str) -> None:
    """Exit with one line of error when packages are missing; else configure the allocator."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        made = (Path(__file__).parents[1] / ".venv" / "bin" / "activate").is_file()
        advice = "source .venv/bin/activate" if made else "make install && source .venv/bin/activate"
        sys.exit(f"{script}: this Python, {sys.executable}, has no module {missing[0]}; run: {advice}")
    use_expandable_segments()


def exit_status(main: Callable[[], int]) -> int:
    """Run a script's main function; return its exit status, an error where stdout's reader has gone, as `head` does."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes
        return EXIT_ERROR
    return status


def run_command(script: str, run: Callable[[], int | None], interrupted: str) -> int:
    """Run a command; return its exit status. A user error, and Ctrl-C with what it leaves, are one line on stderr."""
    try:
        return run() or EXIT_DONE
    except BadInput as error:
        print(f"{script}: {error}", file=sys.stderr, flush=True)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"{script}: interrupted{interrupted}", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED


def use_expandable_segments() -> None:
    """Enable expandable segments of torch's CUDA allocator, unless the user has configured it.

    Segments of fixed size fragment: they take 3 to 20 % more memory than is used.
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
