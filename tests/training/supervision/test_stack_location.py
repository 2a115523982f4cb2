"""Stack location: a line of this repository is reported, even if a thread or another package's code is running."""

import re
import threading
import time

import pytest
import torch.distributed as dist

from training.supervision import stack_location
from training.supervision.stack_location import current_line, line_of_error

HERE = r"tests/training/supervision/test_stack_location\.py:\d+"


def test_waiting_rank_reports_the_line_of_its_save() -> None:
    may_end, lines = threading.Event(), []

    def save() -> None:
        may_end.wait(20)

    def watch() -> None:
        for _ in range(100):  # until the main thread waits
            lines.append(current_line())
            if lines[-1].endswith(", save"):
                break
            time.sleep(0.1)
        may_end.set()

    threads = [threading.Thread(target=work) for work in (save, watch)]
    for thread in threads:
        thread.start()
    threads[0].join()
    threads[1].join()
    assert re.fullmatch(rf"{HERE}, save", lines[-1]), lines


def test_error_is_located_in_this_repository() -> None:
    try:
        re.compile("(")
    except re.error as error:
        line = line_of_error(error.__traceback__)
    assert re.fullmatch(rf"{HERE}, test_error_is_located_in_this_repository", line), line


def test_error_in_a_collective_names_the_collective() -> None:
    try:
        dist.barrier()
    except Exception as error:  # noqa: BLE001  # torch raises it because there is no process group
        line = line_of_error(error.__traceback__)
    assert re.fullmatch(rf"\w+ \({HERE}, test_error_in_a_collective_names_the_collective\)", line), line


def test_unreadable_frames_still_give_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_location, "_innermost", lambda walk: 1 / 0)
    assert current_line() == "an unknown line (ZeroDivisionError)"
