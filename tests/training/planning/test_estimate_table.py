"""The table of train.py --plan: measurements before estimates, one line for each exception.

forecast.json below it is shown while the recipe is the one it was made for.
"""

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from common.errors import BadInput
from tests.conftest import ROOT, train
from training.config.train_config import Run, load_run
from training.hardware.gpus import known_gpus
from training.planning.estimate import RunEstimate, StartUp, gpus_by_name, make_estimate
from training.planning.estimate_table import FORECAST, describe_estimate, describe_forecast_file, recipe_of
from training.planning.price_list import MACHINES, Machine, PriceList, read_machines


def estimate(run: Run, prices: PriceList) -> RunEstimate:
    return make_estimate(run, prices, {run.train.data.parts[0].dataset: None})


def test_a_plan_prices_machines_that_one_does_not_have_and_writes_nothing() -> None:
    run = ROOT / "runs" / "8xa100"
    before = sorted(run.iterdir())
    done = train(run, "--plan", "--set", "microbatch_size=128", "--set", "global_batch_size=1024")
    assert done.returncode == 0, done.stderr
    assert "3,110 steps x 1,048,576 = 3,261,071,360 tokens" in done.stdout
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("8x")}
    assert list(rows) == [*json.loads(MACHINES.read_text())["machines"], "8xa100-40gb:"]
    assert re.search(r" 64 x 2 x 8 .* \d+\.\d of 37\.4 .* measured, another trainer +cheapest$", rows["8xa100-40gb"])
    assert "8xa100-40gb: 128 does not fit; start with --set microbatch_size=64" in done.stdout
    assert re.search(r" 128 x 1 x 8 .* of 169\.1 .* measured, another trainer +fastest$", rows["8xb200"])
    assert re.search(r" 262,840 +3\.\d+ +3\d\.\d+ +measured, another trainer ", rows["8xa100-40gb"])
    assert re.search(
        r"^ +<= [\d,]+ +>= 0\.\d+ +>= \d\.\d+ +upper bound: datasheet, [\d.]+ x the measured$",
        done.stdout,
        re.MULTILINE,
    )
    assert "cheapest, fastest: of the machines with known tokens/s (measured, another trainer)" in done.stdout
    assert "calibrated on torch's allocator, met on one H200" in done.stdout
    assert "prices of 2025-12-06: training/planning/machines.json; " in done.stdout
    assert "and 120 s of start-up (an assumption)" in done.stdout
    assert sorted(run.iterdir()) == before


def test_a_machine_that_needs_another_micro_batch_is_told_which(tmp_path: Path) -> None:
    machines = {
        "two": {"gpu": "l4", "gpus": 2, "usd_per_hour": 1},
        "sixteen": {"gpu": "l4", "gpus": 16, "usd_per_hour": 2},
        "three": {"gpu": "l4", "gpus": 3, "usd_per_hour": 3},
    }
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"date": "2026-01-01", "machines": machines}))
    run, prices = load_run(ROOT / "runs" / "8xa100", []), read_machines(path, ["two", "two", "sixteen", "three"])
    lines = describe_estimate(estimate(run, prices))
    named = "machine      8 GPUs, by the directory's name; the price list has none: the table is of others, "
    assert lines[0].startswith(named) and "world size 8" in lines[2]
    assert [line for line in lines if re.match("(two|sixteen|three): ", line)] == [
        "sixteen: a batch of 128 in micro-batches of 16 leaves some of 16 GPUs idle; start with --set "
        "microbatch_size=8",
        "three: a batch of 128 in micro-batches of 16 leaves some of 3 GPUs idle; start with --set microbatch_size=4",
    ]


def test_the_cheapest_by_a_roofline_that_is_not_fitted_is_said_to_be() -> None:
    run, prices = load_run(ROOT / "runs" / "8xa100", ["model.n_layers=11"]), read_machines(MACHINES, [])
    lines = describe_estimate(estimate(run, prices))
    assert (
        "cheapest, fastest: by estimates alone; nobody has measured a network of this shape on these machines" in lines
    )
    assert "cheapest: 8xb200, by a roofline that is not fitted to its GPU; of the others 8xa100-40gb, $6.06" in lines


def test_a_measured_machine_is_the_cheapest_and_a_cheaper_estimate_is_only_told() -> None:
    run, prices = load_run(ROOT / "runs" / "8xa100", []), read_machines(MACHINES, [])
    unmeasured = Machine(name="2xh100-80gb", gpu=known_gpus()["h100-80gb"], gpus=2, usd_per_hour=5.98)
    prices = attrs.evolve(prices, machines=(*prices.machines, unmeasured))
    lines = describe_estimate(estimate(run, prices))
    assert [line.split()[0] for line in lines if line.endswith("cheapest")] == ["8xa100-40gb"]
    machines = [line.split()[0] for line in lines if re.match(r"\dxh?[ab]?\d", line)]
    assert machines[-1] == "2xh100-80gb" and len(machines) == 5  # measured ones first
    measured = attrs.evolve(estimate(run, prices), start_up=StartUp(seconds=42.0, jobs=2))
    assert "42 s of start-up (measured, median of this run's 2 earlier jobs)" in "\n".join(describe_estimate(measured))
    assert "not measured, cheaper by its estimate: 2xh100-80gb, $6.27" in lines


@pytest.mark.parametrize("name", ["1xh100", "speedrun-1xrtx3090"])
def test_a_run_is_planned_for_the_gpus_that_its_directory_is_named_after(name: str) -> None:
    lines = describe_estimate(estimate(load_run(ROOT / "runs" / name, []), read_machines(MACHINES, [])))
    assert lines[0].startswith("machine      1 GPU, by the directory's name; the price list has none: ")
    assert lines[2].endswith(" x world size 1") and not any("world size 8" in line for line in lines)


def test_the_size_of_a_model_is_no_number_of_gpus() -> None:
    names = ("8xa100", "4xl40s", "speedrun-1xrtx3090", "2xmine", "gpt-2xl", "2xlarge", "gpt-2xl-16xh100", "0xh100")
    assert [gpus_by_name(Path(name)) for name in names] == [8, 4, 1, 2, None, None, 16, None]


def test_speed_and_price_of_a_small_network_are_unknown_and_it_has_no_cheapest_machine() -> None:
    lines = describe_estimate(estimate(load_run(ROOT / "runs" / "laptop", []), read_machines(MACHINES, [])))
    assert lines[0] == "machine      8xa100-40gb"
    rows = [line for line in lines if line.startswith("8x") and " GiB" not in line and ":" in line]
    priced = [line for line in rows if "unknown: no kernel of so small a network was measured" in line]
    assert len(priced) == 4 and not re.search(r"cheapest$|fastest$|estimate|upper bound", "\n".join(lines))
    assert any(line.startswith("tokens/s, hours and dollars of so small a network are unknown") for line in lines)


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Path:
    for name in ("model.json", "train.json"):
        (tmp_path / name).write_bytes((ROOT / "runs" / "speedrun-8xh100" / name).read_bytes())
    record = {
        "date": "2026-11-23",
        "commit": "abc1234",
        "target": {"loss": 3.28, "low": 3.25, "high": 3.31, "extrapolation": 12.34},
        "points": [{}] * 12,
        "held_out": {"error": 0.004},
        "recipe": recipe_of(load_run(tmp_path, [])),
    }
    (tmp_path / FORECAST).write_text(json.dumps(record))
    return tmp_path


def change(run: Path, **values: Any) -> None:
    path = run / FORECAST
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_plan_ends_with_the_forecast_and_is_otherwise_as_without(run: Path) -> None:
    options = ("--plan", "--machine", "8xh100-80gb")
    shown = train(run, *options).stdout.splitlines()
    assert shown[-2:] == [
        "forecast     loss 3.2800 [3.2500, 3.3100], 90 % interval of one run, at 12.3 x the compute of its ladder's "
        "largest run",
        "             ladder of 12 runs, 2026-11-23, commit abc1234: its largest size, held out, was missed by 0.4 % "
        "on average",
    ]
    (run / FORECAST).unlink()
    assert train(run, *options).stdout.splitlines() == shown[:-2]


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("learning_rate=0.004", "train.json: learning_rate is 0.004, and was 0.0036 when it was made"),
        ("min_train_tokens=1000000000", "train.json: min_train_tokens is 1000000000, and was 2400190464 when"),
        ("model.n_layers=24", "model.json: n_layers is 24, and was 12 when"),
        ("validation_sequences=64", "train.json: validation_sequences is 64, and was 10240 when it was made"),
        ("start_val_token=1", "train.json: start_val_token is 1, and was 0 when it was made"),
        ("dataset=other", "train.json: dataset is 'other', and was 'kjj0/fineweb10B-gpt2' when"),
    ],
)
def test_a_changed_recipe_says_which_key_in_place_of_the_loss(run: Path, override: str, change: str) -> None:
    [line] = describe_forecast_file(load_run(run, [override]))
    assert line.startswith("forecast     not for this run: ") and change in line


@pytest.mark.parametrize("override", ["microbatch_size=32", "random_seed=7", "parallel=fsdp", "checkpoint_interval=9"])
def test_keys_that_do_not_move_the_loss_keep_the_forecast(run: Path, override: str) -> None:
    assert describe_forecast_file(load_run(run, [override])) == describe_forecast_file(load_run(run, []))


def test_a_key_that_the_forecast_does_not_know_had_its_default(run: Path) -> None:
    recipe = recipe_of(load_run(run, []))
    del recipe["model"]["logit_softcap"], recipe["train"]["era_tokens"]
    change(run, recipe=recipe)
    assert len(describe_forecast_file(load_run(run, []))) == 2
    [line] = describe_forecast_file(load_run(run, ["model.logit_softcap=15"]))
    assert "logit_softcap is 15.0, and was None when" in line
    del recipe["train"]["validation_sequences"]  # as in forecasts of older versions
    change(run, recipe=recipe)
    assert len(describe_forecast_file(load_run(run, ["validation_sequences=64"]))) == 2


def test_a_run_without_a_file_has_no_forecast() -> None:
    assert describe_forecast_file(load_run(ROOT / "runs" / "quickstart", [])) == []


DAMAGED = ["{", "[]", "{}", '{"recipe": 3}', "\0"]
WRONG: list[dict[str, Any]] = [{"target": {"loss": "x"}}, {"points": 3}, {"held_out": []}, {"target": None}]


@pytest.mark.parametrize("content", [*DAMAGED, *WRONG])
def test_a_damaged_file_is_one_line_of_error(run: Path, content: str | dict[str, Any]) -> None:
    if isinstance(content, dict):
        change(run, **content)
    else:
        (run / FORECAST).write_text(content)
    problem = "" if isinstance(content, str) else "not a ladder's forecast"
    advice = "move it away, or run experiment.py ladder again$"
    with pytest.raises(BadInput, match=rf"forecast\.json: {problem}.*; {advice}"):
        describe_forecast_file(load_run(run, []))
