"""Price lists: errors name the wrong entry, and users can add GPUs.

Spot machines: the expected time is the mean of simulated runs, and Young's checkpoint interval is nearly the best.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from preempted_runs import START_UP, WORK, continuing_run, simulate, waiting_run

from common.errors import BadInput
from tests import launch
from tests.conftest import ROOT, one_line, train
from training.planning.price_list import PREEMPTIONS_PER_HOUR, Preemptions, read_machines

PRICE_LIST = {"date": "2026-01-01", "machines": {"x": {"gpu": "b200", "gpus": 8, "usd_per_hour": 1}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("{", "not JSON"),
        ('{"date": "2026-01-01", "machines": {}}', 'wanted {"date": "...", "machines": {"NAME": {...}}}'),
        ("[" * 100_000, "nested deeper than 100"),
        ({"date": "soon"}, "date: got 'soon', wanted the day of the prices"),
        ({"gpu": "b2000"}, "x: gpu: unknown GPU 'b2000'; did you mean 'b200'?"),
        ({"gpu": ["b200"]}, "x: gpu: got ['b200'], wanted the name of a GPU"),
        ({"usd_per_hour": -3}, "x: usd_per_hour: got -3, wanted a number above 0"),
        ({"usd_per_hour": 10**400}, "x: usd_per_hour: got 1000"),
        ({"usd_per_hour": math.nan}, "x: usd_per_hour: got nan, wanted a number above 0"),
        ({"gpus": "8"}, "x: gpus: got '8', wanted an integer of at least 1"),
        ({"price": 3}, "x: unknown key 'price'"),
        ({"tokens_per_second": 0}, "x: tokens_per_second: got 0"),
        ({"spot_usd_per_hour": 0}, "x: spot_usd_per_hour: got 0, wanted a number above 0"),
        (PRICE_LIST | {"gpus": {"b200": {"memory_gib": 12}}}, "b200: key 'bf16_tflops' is missing; wanted memory_gib"),
    ],
)
def test_invalid_price_lists_are_refused(tmp_path: Path, changes: str | dict[str, Any], message: str) -> None:
    path = tmp_path / "prices.json"
    values = json.loads(json.dumps(PRICE_LIST))
    if isinstance(changes, dict):
        (values if "date" in changes else values["machines"]["x"]).update(changes)
    path.write_text(changes if isinstance(changes, str) else json.dumps(values))
    with pytest.raises(BadInput) as raised:
        read_machines(path, [])
    assert str(raised.value).startswith(f"{path}: ") and message in str(raised.value)


NEW_GPU = {"gpus": {"weird": {"memory_gib": 12.0, "bf16_tflops": 50, "gb_per_second": 400}}}
NEW_MACHINE = {"date": "2026-01-01", "machines": {"4xweird": {"gpu": "weird", "gpus": 4, "usd_per_hour": 2}}}


def test_price_list_can_add_a_gpu(tmp_path: Path) -> None:
    path, runs = tmp_path / "mine.json", ROOT / "runs" / "8xa100"
    path.write_text(json.dumps(NEW_MACHINE))
    line = one_line(train(runs, "--plan", "--machines", str(path)))
    advice = re.search(r"to add a GPU, write (\{.*\}) with its numbers into a file, and pass that as --machines$", line)
    assert advice and f"{path}: 4xweird: gpu: unknown GPU 'weird'; " in line
    assert json.loads(advice[1])["gpus"]["weird"] == dict.fromkeys(NEW_GPU["gpus"]["weird"], 0)
    mine = NEW_MACHINE | NEW_GPU
    planned = r"^4xweird +2\.00 .* rough$"
    for values, options, pattern in (
        (NEW_GPU, ("--predict", "weird"), r"^weird +11\.4 "),
        (mine, ("--predict", "weird,l4", "--world-size", "4"), r"^weird +11\.4 +ddp .* 16$"),
        (mine, ("--plan",), planned),
    ):
        path.write_text(json.dumps(values))
        script = ROOT / ("train.py" if "--plan" in options else "find_batch_size.py")
        done = launch.run(script, str(runs), *options, "--machines", str(path))
        assert done.returncode == 0 and re.search(pattern, done.stdout, re.MULTILINE), done.stderr


SPOT = Preemptions(per_hour=PREEMPTIONS_PER_HOUR, checkpoint_seconds=60.0, segments=WORK / 900)


@pytest.mark.parametrize("per_hour", [0.1, PREEMPTIONS_PER_HOUR, 2.0])
def test_expected_time_is_the_mean_of_simulated_runs(per_hour: float) -> None:
    setting = attrs.evolve(SPOT, per_hour=per_hour)
    mean, error = simulate(waiting_run, setting, 1000)
    assert abs(mean - setting.seconds(START_UP, WORK) / 3600) < 3 * error
    assert simulate(continuing_run, setting, 1000)[0] < mean


def test_expected_time_without_and_with_too_many_preemptions() -> None:
    rare, often = attrs.evolve(SPOT, per_hour=1e-9), attrs.evolve(SPOT, per_hour=60.0, segments=1.0)
    assert rare.seconds(START_UP, WORK) == pytest.approx(START_UP + WORK + 40 * 60)
    assert math.isfinite(often.seconds(START_UP, WORK)) and often.seconds(START_UP, 1e7) == math.inf


def test_youngs_interval_is_nearly_the_best() -> None:
    def seconds(interval: float) -> float:
        return attrs.evolve(SPOT, segments=WORK / interval).seconds(START_UP, WORK)

    assert seconds(SPOT.best_interval_seconds()) < 1.001 * min(map(seconds, range(100, 4000, 50)))
