"""Progress bar: the numbers of a step as one line; plain lines where stderr is no terminal."""

import pytest

from training.telemetry.progress_bar import ProgressBar, duration


@pytest.mark.parametrize(("seconds", "text"), [(41.6, "42s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m")])
def test_a_duration_is_as_people_read_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_lines_are_few_and_a_warning_stays_until_it_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(0, 10)
    bar._last_line = float("inf")  # as if a line had just been printed
    bar.show(9, "loss 3")
    bar.show(10, "loss 2")
    bar.warn("checkpoint", "step 8 NOT SAVED")
    bar.show(10, "loss 2")
    bar.warn("slowest rank", "SLOW: rank 1")
    bar.warn("checkpoint", None)
    bar.show(10, "loss 1")
    bar.close()
    lines = capsys.readouterr().err.splitlines()  # of the last step, always
    assert lines == ["step 10/10  loss 2", "step 10/10  loss 2  step 8 NOT SAVED", "step 10/10  loss 1  SLOW: rank 1"]
