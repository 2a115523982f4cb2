"""Estimates of a run's hours on rented machines agree with published training times.

Other tests check plans for several nodes.
"""

import json
import re
from pathlib import Path

import attrs
import pytest

from common.arguments import parse
from common.errors import BadInput
from tests.conftest import ROOT, complete
from tests.training.config.test_train_config import GPT2_124M, PUBLIC, run_directory
from training.build import make_intervals
from training.command import Options, TrainCommand
from training.config.train_config import load_run
from training.planning.dry_run import dry_run
from training.planning.estimate import ASSUMED_START_UP_SECONDS, make_estimate, start_up_of
from training.planning.price_list import MACHINES, read_machines
from training.planning.throughput import Network
from training.telemetry.metrics_log import METRICS
from training.telemetry.time_ledger import PARTS

RUN, LENGTHS = ROOT / "runs" / "8xa100", {"gpjt/fineweb-gpt2-tokens": None}
# From gpjt's table "Costs of training in the cloud". For each machine: the micro-batch, the seconds of the complete
# training with validation, the seconds without validation, and the tokens/s that the trainer printed.
PUBLISHED = {
    "8xa100-40gb": (13, 13904, 12404, 234480),
    "8xa100-80gb": (28, 11532, 9948, 282707),
    "8xh100-80gb": (27, 6650, 5738, 490249),
    "8xb200": (64, 4190, 3530, 778107),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_training_times_are_estimated_within_ten_percent(tmp_path: Path, name: str) -> None:
    size, total_seconds, without_validation, printed = PUBLISHED[name]
    batches = {"microbatch_size": size, "validation_interval": 617, "validation_batches": 300}
    run = run_directory(tmp_path / "run", GPT2_124M | {"tie_weights": False}, PUBLIC | batches)
    estimate = make_estimate(load_run(run, []), read_machines(MACHINES, [name]), LENGTHS)
    [offer] = estimate.offers
    assert offer.plan is not None
    assert 3600 * offer.hours(printed) == pytest.approx(total_seconds, rel=0.1)
    measured = offer.throughputs[0]
    assert 3600 * offer.hours(measured.tokens_per_second) == pytest.approx(without_validation, rel=0.1)
    assert measured.tokens_per_second == pytest.approx(offer.plan.train_tokens / without_validation, rel=1e-5)


def test_idle_gpus_take_time(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    machines = {name: {"gpu": "l4", "gpus": gpus, "usd_per_hour": 1} for name, gpus in (("two", 2), ("three", 3))}
    path.write_text(json.dumps({"date": "2026-01-01", "machines": machines}))
    run = load_run(RUN, ["validation_interval=null", "microbatch_size=4"])
    estimate = make_estimate(run, read_machines(path, ["two", "three"]), LENGTHS)
    two, three = sorted(estimate.offers, key=lambda offer: offer.machine.gpus)
    # Each step has 32 micro-batches: 16 on each of two GPUs, or 11, 11 and 10 on three GPUs.
    assert three.token_equivalents == pytest.approx(two.token_equivalents * 33 / 32)


FEW = ("--set", "microbatch_size=4", "--set", "global_batch_size=4")
HUGE = ("--set", "model.emb_dim=12288", "--set", "model.n_layers=13")  # wide, because counting many layers is slow


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--machine", "8xa100-40g"], "--machine 8xa100-40g: no such machine; did you mean '8xa100-40gb'?"),
        ([*HUGE], "too big for every machine: under ddp it needs"),
        (["--set", "model.emb_dim=12288", "--set", "model.n_layers=8"], "predicted to fit: --set parallel=fsdp"),
        (
            ["--set", "microbatch_size=2048", "--set", "global_batch_size=16384"],
            "train.json: microbatch_size: got 2048, too big for every machine: under ddp it needs",
        ),
        (
            [*FEW, "--set", "model.context_length=24576", "--machine", "8xrtx3090"],
            "1 is the largest that fits, on 8xrtx3090: set microbatch_size=1, and a larger global_batch_size",
        ),
        (
            [*FEW, "--machine", "8xa100-40gb"],
            "--set: global_batch_size: got 4, wanted at least one sequence for each of the 8 data-parallel ranks of "
            "8xa100-40gb",
        ),
    ],
)
def test_impossible_plans_are_reported_in_one_line(options: list[str], message: str) -> None:
    command = parse("train.py", TrainCommand, [str(RUN), "--plan", *options])
    with pytest.raises(BadInput) as raised:
        dry_run(load_run(RUN, command.overrides), command, None)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_tokens_per_second_above_the_peak_are_refused(tmp_path: Path) -> None:
    run, prices = load_run(RUN, []), read_machines(MACHINES, ["8xb200"])
    [machine] = prices.machines
    entered = attrs.evolve(prices, machines=(attrs.evolve(machine, tokens_per_second=1e9),))
    with pytest.raises(BadInput, match=r"8xb200: tokens_per_second: got 1e\+09, but the peak of .* at most 24,2"):
        make_estimate(run, entered, {run.train.data.parts[0].dataset: None})


@pytest.mark.parametrize(
    ("datasets", "validation", "checkpoint"), [(1, 617, 617), (1, 4, 6), (1, 100, 7), (1, 1, 5), (2, 100, 7)]
)
def test_plan_counts_all_validations_of_a_run(datasets: int, validation: int, checkpoint: int) -> None:
    prices = read_machines(MACHINES, ["8xb200"])
    mixture = json.dumps([{"dataset": f"text{n}", "weight": 1} for n in range(datasets)])
    run = load_run(RUN, [f"dataset={mixture}", "min_train_tokens=1000000000"])
    train_config = run.train.replace(validation_interval=validation, checkpoint_interval=checkpoint)
    run = attrs.evolve(run, train=train_config)
    estimate = make_estimate(run, prices, {part.dataset: None for part in run.train.data.parts})
    [offer] = estimate.offers
    assert offer.plan is not None
    steps, plan = offer.plan.steps, offer.plan
    intervals = make_intervals(run.train, plan, Options())
    validations = sum(intervals.validation_due(step) for step in range(steps + 1))
    expected = (plan.train_tokens + validations * datasets * plan.validation_sequences * 1024 / 3) / 1e6
    assert 3600 * offer.hours(1e6) - ASSUMED_START_UP_SECONDS == pytest.approx(expected)


def test_start_up_time_is_taken_from_earlier_jobs(tmp_path: Path) -> None:
    assert start_up_of(tmp_path) == (ASSUMED_START_UP_SECONDS, 0)
    parts = dict.fromkeys(PARTS, 0.0)
    ledgers = [parts | {"start-up": start_up, "compile": 30.0, "training": 9.0} for start_up in (10.0, 50.0, 60.0)]
    lines = [{"step": 1, "ledger": ledger, "run_ledger": ledger, "elapsed_seconds": 1.0} for ledger in ledgers]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert start_up_of(tmp_path) == (80.0, 3)


def test_two_nodes_are_less_than_twice_as_fast() -> None:
    run, prices = load_run(RUN, []), read_machines(MACHINES, ["8xh100-80gb"])
    [single] = make_estimate(run, prices, LENGTHS).offers
    [two] = make_estimate(run, prices, LENGTHS, Network(nodes=2, link=50.0)).offers
    [slow] = make_estimate(run, prices, LENGTHS, Network(nodes=2, link=1.0)).offers
    assert two.machine.name == "2 x 8xh100-80gb"
    assert (two.machine.gpus, two.machine.usd_per_hour) == (16, 2 * single.machine.usd_per_hour)
    speeds = [offer.throughputs[0].tokens_per_second for offer in (slow, single, two)]
    assert speeds[0] < speeds[1] < speeds[2] < 2 * speeds[1]
    assert {throughput.kind for throughput in two.throughputs} == {"simulation"}


def test_fsdp_over_a_slow_link_also_waits_for_weights() -> None:
    prices, network = read_machines(MACHINES, ["8xh100-80gb"]), Network(nodes=2, link=1.0)
    offers = {
        parallel: make_estimate(load_run(RUN, [f"parallel={parallel}"]), prices, LENGTHS, network).offers[0]
        for parallel in ("hsdp", "fsdp")
    }
    assert offers["fsdp"].hours() > offers["hsdp"].hours()


def test_plan_of_several_nodes_is_called_a_simulation() -> None:
    done = complete(RUN, "--plan", "--machine", "8xh100-80gb", "--nodes", "2", "--node-link", "50")
    assert re.search(r"^2 x 8xh100-80gb +63\.84 .*simulation", done.stdout, re.MULTILINE)
    assert "50 GB/s between nodes" in " ".join(done.stdout.split())
