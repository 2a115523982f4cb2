"""torchrun's end: its table of failures, and the form without a log and a traceback of its own."""

from collections.abc import Callable
from pathlib import Path

from tests.conftest import train


def test_torchruns_table_ends_with_our_line(make_run: Callable[..., Path]) -> None:
    for options, said in ((["--set", "learning_rate=-1"], "--set: learning_rate"), (["--dtset"], "Unknown option")):
        done = train(make_run(said[:3]), *options, ranks=2)
        assert done.stderr.splitlines()[-2].startswith(f"  traceback : {said}"), done.stderr
        assert done.stderr.count(f"train.py: {said}") == 1
