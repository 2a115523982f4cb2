"""Stack location: the line of this repository, through joined threads, tracebacks and foreign code."""

import re
import threading
import time

import pytest
import torch.distributed as dist

from training.supervision import stack_location
from training.supervision.stack_location import current_place, place_of_error

HERE = r"tests/training/supervision/test_stack_location\.py:\d+"


def test_a_rank_that_waits_for_its_save_stands_where_the_save_does() -> None:
    seen, places = threading.Event(), []

    def save() -> None:
        seen.wait(20)

    def look() -> None:
        for _ in range(100):  # until the main thread waits
            places.append(current_place())
            if places[-1].endswith(", save"):
                break
            time.sleep(0.1)
        seen.set()

    threads = [threading.Thread(target=work) for work in (save, look)]
    for thread in threads:
        thread.start()
    threads[0].join()
    threads[1].join()
    assert re.fullmatch(rf"{HERE}, save", places[-1]), places


def test_an_error_is_at_the_innermost_line_of_this_repository() -> None:
    try:
        re.compile("(")
    except re.error as error:
        place = place_of_error(error.__traceback__)
    assert re.fullmatch(rf"{HERE}, test_an_error_is_at_the_innermost_line_of_this_repository", place), place


def test_an_error_of_a_collective_names_the_collective() -> None:
    try:
        dist.barrier()
    except Exception as error:  # noqa: BLE001  # torch's own, without a process group
        place = place_of_error(error.__traceback__)
    assert re.fullmatch(rf"\w+ \({HERE}, test_an_error_of_a_collective_names_the_collective\)", place), place


def test_frames_that_cannot_be_read_give_a_place_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_location, "_innermost", lambda walk: 1 / 0)
    assert current_place() == "an unknown line (ZeroDivisionError)"
