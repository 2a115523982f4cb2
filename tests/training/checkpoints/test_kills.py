"""kill -9 at random instants; `make test-long` does it a hundred times."""

from collections.abc import Callable
from pathlib import Path

from tests.walks import Layout, kill_again_and_again


def test_five_kills_at_random_change_nothing(make_run: Callable[..., Path]) -> None:
    layouts = [Layout(ranks=2, parallel="ddp"), Layout(ranks=2, parallel="fsdp")]
    log, hashes = kill_again_and_again(make_run, layouts, kills=5, steps=200, as_user=False)
    assert len(log) == 5
    assert len(hashes) == 1
