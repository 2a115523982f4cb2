"""The table of `--plan` shows machines for rent with their prices, and writes nothing."""

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.conftest import ROOT, MakeRun, complete
from tests.reporting.written_runs import write_resolved
from training.config.train_config import Run, load_run
from training.planning.estimate import RunEstimate, gpus_by_name, make_estimate
from training.planning.plan_table import describe_estimate, wrapped
from training.planning.price_list import MACHINES, PriceList, read_machines
from training.telemetry.metrics_log import METRICS


def estimate(run: Run, prices: PriceList) -> RunEstimate:
    return make_estimate(run, prices, {run.train.data.parts[0].dataset: None})


PRICES = ("8xa100-40gb", "8xh100-80gb", "1xh200", "1xrtx4090")


def rows(lines: list[str]) -> list[list[str]]:
    """Return the rows of the first table, split into cells."""
    start = next((number for number, line in enumerate(lines) if line.startswith("---")), len(lines))
    table = lines[start + 1 :]
    return [re.split(" {2,}", line) for line in table[: table.index("")]] if table else []


def test_plan_prices_all_machines_and_writes_nothing() -> None:
    run = ROOT / "runs" / "8xa100"
    before = sorted(run.iterdir())
    done = complete(run, "--plan", "--set", "microbatch_size=128", "--set", "global_batch_size=1024")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and "3,110 steps x 1,048,576 = 3,261,071,360 tokens" in done.stdout
    table = rows(lines)
    names = [row[0] for row in table]
    machines = json.loads(MACHINES.read_text())["machines"]
    spot = [f"{name} spot" for name in machines if "spot_usd_per_hour" in machines[name]]
    assert sorted(names) == sorted([*machines, *spot])
    requested = sum(name[0] == "8" for name in names)  # machines with 8 GPUs come first
    assert {row[0][:6] for row in table[:2]} == {"8xa100"} and all(name[0] == "8" for name in names[:requested])
    costs = [float(row[4].partition("-")[0]) for row in table]
    assert costs == [*costs[:2], *sorted(costs[2:requested]), *sorted(costs[requested:])]
    [first] = [row for row in table if row[0] == "8xa100-40gb"]
    assert first[1:3] == ["15.92", "263K-1.56M"] and first[5] == "estimate, others"
    text = " ".join(line.strip() for line in lines)
    assert re.search(r"8xa100-40gb.*: 128 does not fit; start with --set microbatch_size=64", text)
    assert "prices of 2026-03-10 to 2026-11-09: training/planning/machines.json; " in text
    assert "and 120 s of start-up (an assumption)" in text
    assert sorted(run.iterdir()) == before


def test_plan_names_a_micro_batch_that_fits(tmp_path: Path) -> None:
    machines = {
        "two": {"gpu": "l4", "gpus": 2, "usd_per_hour": 1},
        "sixteen": {"gpu": "l4", "gpus": 16, "usd_per_hour": 2},
        "three": {"gpu": "l4", "gpus": 3, "usd_per_hour": 3},
        "3": {"gpu": "l4", "gpus": 3, "usd_per_hour": 3},
        "another one of a name without an end " * 2: {"gpu": "l4", "gpus": 2, "usd_per_hour": 123456.7},
    }
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"date": "2026-01-01", "machines": machines}))
    run, prices = load_run(ROOT / "runs" / "8xa100", []), read_machines(path, ["two", *machines])
    lines = describe_estimate(estimate(run, prices))
    text = " ".join(line.strip() for line in lines)
    assert max(map(len, wrapped(lines))) <= 80
    assert text.startswith("machine      8 GPUs, as in the directory's name model ")
    assert "world size 8" in text and "two: a batch" not in text
    idle = "a batch of 128 in micro-batches of 16 leaves some of the"
    advice = f"sixteen: {idle} 16 GPUs idle; start with --set microbatch_size=8 three, 3: {idle} 3 GPUs idle; start"
    assert advice in text


def test_plan_names_the_cheapest_and_cheapest_measured_machines() -> None:
    run, prices = load_run(ROOT / "runs" / "1xh100", []), read_machines(MACHINES, PRICES)
    lines = describe_estimate(estimate(run, prices))
    assert [row[0] for row in rows(lines)][:3] == ["1xrtx4090 spot", "1xrtx4090", "1xh200"]
    assert rows(lines)[2][5] == "measured here"
    text = "\n".join(lines)
    assert re.search(r"^cheapest: 1xrtx4090 spot, \$\d\.\d\d in \d\.\d\d hours \(rough\)$", text, re.MULTILINE)
    assert "\ncheapest with a measurement: 1xh200, $8.69 in 1.89 hours (measured here)\n" in text
    measured = attrs.evolve(estimate(run, prices), start_up=(42.0, 2))
    text = " ".join(line.strip() for line in describe_estimate(measured))
    assert "42 s of start-up (measured, median of this run's 2 earlier jobs)" in text


@pytest.mark.parametrize(("name", "gpu"), [("1xh100", "h100"), ("speedrun-1xrtx3090", "rtx3090")])
def test_run_is_planned_for_the_gpus_in_its_name(name: str, gpu: str) -> None:
    lines = describe_estimate(estimate(load_run(ROOT / "runs" / name, []), read_machines(MACHINES, [])))
    assert lines[0] == "machine      1 GPU, as in the directory's name"
    assert "world size 1" in " ".join(map(str.strip, lines)) and rows(lines)[0][0].startswith(f"1x{gpu}")
    assert all(row[0].startswith("1x") for row in rows(lines)[:14])


LLAMA_7B = ("model.emb_dim=4096", "model.n_heads=32", "model.n_layers=32", "model.context_length=4096")


def test_plan_names_the_cheapest_layout_that_fits() -> None:
    settings = [*LLAMA_7B, "global_batch_size=64", "microbatch_size=1", "parallel=fsdp"]
    run, prices = load_run(ROOT / "runs" / "8xa100", settings), read_machines(MACHINES, ["8xa100-40gb", "8xh100-80gb"])
    lines = describe_estimate(estimate(run, prices))
    first, second = (number for number, line in enumerate(lines) if line.startswith("---"))
    [row] = rows(lines[second:])
    assert [cells[0] for cells in rows(lines[first:])] == ["8xh100-80gb"]
    assert row[:2] == ["8xa100-40gb", "ddp/4"] and row[-1] == "fsdp/4 ddp/4"
    assert any("on other machines, fsdp/1 is the cheapest according to the estimate" in line for line in lines)
    shared = load_run(ROOT / "runs" / "8xa100", [*settings[:-1], "tensor_parallel=4", "parallel=ddp", "loss_chunks=8"])
    prices = read_machines(MACHINES, ["8xh100-80gb", "1xh100-80gb"])
    lines = describe_estimate(estimate(shared, prices))
    assert [row[0] for row in rows(lines)] == ["8xh100-80gb"] and any(" x world size 8" in line for line in lines)
    assert "1xh100-80gb: tensor_parallel: got 4, wanted a divisor of 1, the machine's number of GPUs" in lines


def test_model_sizes_in_names_are_not_gpu_counts() -> None:
    names = ("8xa100", "4xl40s", "speedrun-1xrtx3090", "2xmine", "gpt-2xl", "2xlarge", "gpt-2xl-16xh100", "0xh100")
    gpus = [(8, "a100"), (4, "l40"), (1, "rtx3090"), (2, "mine"), None, None, (16, "h100"), None]
    assert [gpus_by_name(Path(name)) for name in names] == gpus


def test_small_networks_are_priced_only_by_their_last_job(make_run: MakeRun) -> None:
    run = load_run(make_run(), [])
    lines = describe_estimate(estimate(run, prices := read_machines(MACHINES, [])))
    assert not rows(lines) and "estimate" not in " ".join(lines)
    assert any(line.startswith("tokens/s of such a small network must be measured: ") for line in lines)
    log: list[dict[str, Any]] = [{"event": "start", "step": 0, "world_size": 1, "price_per_hour": None}]
    log += [{"step": step, "train_loss": 1.0, "tokens_per_second": 1e4 * step} for step in (1, 2, 3)]
    write = (run.directory / METRICS).write_text
    write("".join(json.dumps(line) + "\n" for line in log))
    [[name, speed, hours, kind]] = rows(describe_estimate(estimate(run, prices)))
    assert (name, speed, kind) == ("its last job", "20.0K", "measured here") and float(hours) > 0
    write("".join(json.dumps(line) + "\n" for line in [log[0] | {"price_per_hour": 2.0}, *log[1:]]))
    [[_, price, _, hours, usd, _]] = rows(describe_estimate(estimate(run, prices)))
    assert price == "2.00" and float(usd) == pytest.approx(2 * float(hours), abs=0.02)
    write(json.dumps(log[0] | {"world_size": "x"}) + "\n" + json.dumps(log[1]) + "\n")
    assert not rows(describe_estimate(estimate(run, prices)))


def test_last_job_with_other_settings_is_ignored(make_run: MakeRun) -> None:
    run = load_run(directory := make_run(), [])
    log = [{"event": "start", "step": 0, "world_size": 1}, {"step": 1, "train_loss": 1.0, "tokens_per_second": 1e4}]
    (directory / METRICS).write_text("".join(json.dumps(line) + "\n" for line in log))
    write_resolved(directory)
    prices = read_machines(MACHINES, ["1xrtx4090"])
    assert rows(describe_estimate(estimate(run, prices)))[0][0] == "its last job"
    for changed in ("n_layers=7", "global_batch_size=64", "recompute_blocks=true"):
        assert "its last job" not in " ".join(describe_estimate(estimate(load_run(directory, [changed]), prices)))
    same = load_run(directory, ["learning_rate=0.1", "drop_rate=0.0"])
    assert rows(describe_estimate(estimate(same, prices)))[0][0] == "its last job"


def test_spot_prices_include_preemptions_and_the_best_interval() -> None:
    prices = attrs.evolve(read_machines(MACHINES, ["1xrtx4090"]), preemptions_per_hour=2.0)

    def plan(interval: int) -> RunEstimate:
        return estimate(load_run(ROOT / "runs/speedrun-1xrtx3090", [f"checkpoint_interval={interval}"]), prices)

    lines = describe_estimate(plan(1000))
    hours = {row[0]: float(row[3]) for row in rows(lines)}
    assert hours["1xrtx4090 spot"] > hours["1xrtx4090"]
    advice = r" checkpoint_interval 1000, .* 2 times per hour .*checkpoint_interval=(\d+);"
    match = re.search(advice, "".join(lines))
    assert match
    best = int(match[1])
    longer, best_hours, shorter = (plan(interval).offers[0].hours() for interval in (best * 2, best, best // 2))
    assert best_hours < min(longer, shorter)
