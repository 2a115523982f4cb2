"""Progress bar: the numbers of a step as one line; plain lines where stderr is no terminal."""

import attrs
import pytest

from training.telemetry.progress_bar import ProgressBar, Status, describe, duration

STATUS = Status(
    step=10,
    loss=3.25,
    tokens_per_second=123456.7,
    mfu=0.412,
    remaining_seconds=185.0,
    spent_usd=1.5,
    remaining_usd=0.25,
)
BARE = Status(
    step=10, loss=3.25, tokens_per_second=9.0, mfu=None, remaining_seconds=None, spent_usd=None, remaining_usd=None
)


def test_a_line_has_the_numbers_that_are_known() -> None:
    assert describe(STATUS) == "loss 3.2500  123,457 tok/s  MFU 41.2%  ETA 3m05s  $1.50 spent, $0.25 to go"
    assert describe(BARE) == "loss 3.2500  9 tok/s"


@pytest.mark.parametrize(("seconds", "text"), [(41.6, "42s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m")])
def test_a_duration_is_as_people_read_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_lines_are_few_and_a_warning_stays_until_it_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(0, 10)
    bar._last_line = float("inf")  # as if a line had just been printed
    bar.show(attrs.evolve(BARE, step=9))
    bar.show(BARE)
    bar.warn("step 8 NOT SAVED")
    bar.show(STATUS)
    bar.warn(None)
    bar.show(BARE)
    bar.close()
    lines = capsys.readouterr().err.splitlines()  # of the last step, always
    assert len(lines) == 3
    assert lines[0] == "step 10/10  loss 3.2500  9 tok/s"
    assert lines[1].endswith("$0.25 to go  step 8 NOT SAVED")
    assert lines[2] == lines[0]
