"""Stop request: who wishes to stop, and what all ranks agree on."""

import threading

import pytest

from training.parallel.process_group import Ranks
from training.supervision.stop_request import StopRequest


@pytest.mark.parametrize(
    ("asked", "condition", "agreed", "signalled"),
    [(False, False, False, False), (False, True, True, False), (True, False, True, True), (True, True, True, True)],
)
def test_a_signal_or_the_ranks_own_condition_stops(
    alone: Ranks, asked: bool, condition: bool, agreed: bool, signalled: bool
) -> None:
    event = threading.Event()
    request = StopRequest(alone, event, lambda: condition)
    if asked:
        event.set()
    assert (request.agreed(), request.signalled) == (agreed, signalled)
