"""Requests to a judge: the pause that its server asks for."""

import httpx2
import pytest

from evaluation.judging.client import _asked_pause


@pytest.mark.parametrize(("asked", "seconds"), [("2", 2), ("0.5", 0.5), ("999", 60), ("1.2.3", 0), ("soon", 0)])
def test_a_pause_is_that_of_the_server_or_ours(asked: str, seconds: float) -> None:
    assert _asked_pause(httpx2.Response(429, headers={"Retry-After": asked})) == seconds
