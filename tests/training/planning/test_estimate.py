"""Where time and money go, and runs that stop before they cost more than they may."""

import argparse
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from common.arguments import number
from common.errors import BadInput
from model.config import GPT2_SIZES
from tests import launch
from tests.conftest import ROOT, TINY_MODEL, train
from tests.training.supervision.runs import SLOW, outcome
from tests.training.test_build import one_line
from training.config.batch_plan import count_due, make_plan
from training.config.train_config import load_run
from training.hardware.gpus import known_gpus
from training.loop import Loop, validation_due
from training.planning.budget import Budget
from training.planning.estimate import START_UP_SECONDS, make_offers, run_seconds
from training.planning.estimate_table import describe_offers
from training.planning.price_list import MACHINES, Machine, read_machines
from training.planning.throughput import MEASUREMENTS, OURS, measurements, roofline, throughput
from training.telemetry.metrics_log import METRICS, read_metrics
from training.telemetry.time_ledger import Earlier, Remaining, TimeLedger, read_earlier

DOLLAR_A_SECOND = ("--price-per-hour", "3600")
LONG = {"max_epochs": 9, "min_train_tokens": 2000 * 8 * 32, "validation_interval": None, "checkpoint_interval": 40}


def last_ledger(run: Path) -> dict[str, Any]:
    """Return the record that a job ends with."""
    return json.loads((run / METRICS).read_text().splitlines()[-1])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def ledger_of(clock: list[float], *, price: float | None = None) -> TimeLedger:
    """Return a ledger after 4 s of start-up, steps of 9, 2 and 2 s, a validation of 5 s and an idle second."""
    ledger = TimeLedger(clock[0], price)
    with ledger.start_up():
        clock[0] += 4.0
    with ledger.measure("training"):
        for seconds in (9.0, 2.0, 2.0):
            clock[0] += seconds
            ledger.after_step(0.0)
        with ledger.measure("validation"):
            clock[0] += 5.0
    clock[0] += 1.0
    return ledger


def test_a_ledger_adds_up_to_the_clock_and_foresees_what_is_due(clock: list[float]) -> None:
    ledger = ledger_of(clock)
    assert ledger.breakdown(waited_for_data_seconds=1.0) == {
        "start-up": 4.0,
        "data": 1.0,
        "compile": 7.0,
        "training": 5.0,
        "validation": 5.0,
        "checkpoints": 0.0,
        "idle": 1.0,
    }
    assert ledger.process_seconds() == 23.0
    assert ledger.remaining_seconds(Remaining(steps=10, validations=2, checkpoints=1)) == 10 * 2.0 + 2 * 5.0


def test_a_wait_for_data_is_neither_compilation_nor_what_a_step_takes(clock: list[float]) -> None:
    ledger = TimeLedger(clock[0])
    with ledger.start_up(), ledger.measure("training"):
        for seconds, waited in ((3609.0, 3600.0), (2.0, 3600.0), (902.0, 4500.0), (2.0, 4500.0)):
            clock[0] += seconds
            ledger.after_step(waited)
    assert ledger.longest_step_seconds() == 2.0
    parts = ledger.breakdown(4500.0)
    assert parts["data"] == 4500.0 and parts["compile"] + parts["training"] == 15.0


def test_what_earlier_jobs_cost_stays_at_their_price_and_lost_work_counts(clock: list[float], tmp_path: Path) -> None:
    def start(price: float | None) -> dict[str, Any]:
        return {"event": "start", "step": 0, "price_per_hour": price}

    first = ledger_of(clock, price=3600).record(0.0)
    killed = [start(1800), {"step": 9, "train_loss": 1.0, "elapsed_seconds": 33.0}]
    lines = [start(3600), first, *killed, start(None), {"step": 9, "train_loss": 1.0, "elapsed_seconds": 40.0}]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    earlier = read_earlier(tmp_path, checkpoint_seconds=20.0)
    assert (earlier.elapsed_seconds, earlier.seconds["lost"]) == (40.0, 10.0 + 7.0)  # two jobs were killed
    fourth = ledger_of(clock, price=7200)
    fourth.earlier = earlier
    assert fourth.usd() == 23 + 10 / 2 + 2 * (7 + 23)
    record = fourth.record(0.0)
    assert sum(record["run_ledger"].values()) == record["elapsed_seconds"] == 40.0 + 23.0
    assert read_earlier(tmp_path / "absent", checkpoint_seconds=20.0).seconds == {"lost": 20.0}


@pytest.mark.parametrize(("hours", "usd", "option"), [(1.0, 40.0, "--max-usd"), (0.0125, 40.0, "--max-hours")])
def test_the_nearest_limit_counts_what_the_stop_takes(
    clock: list[float], hours: float, usd: float, option: str
) -> None:
    ledger = ledger_of(clock, price=3600)
    ledger.earlier = Earlier(elapsed_seconds=10.0, usd=2.0)
    budget = Budget(max_hours=hours, max_usd=usd)
    left = {"--max-usd": 40 - 25, "--max-hours": 45 - 33}[option]
    assert budget.seconds_left(ledger) == (pytest.approx(left), option)
    steps_and_end = 2 * 2.0 + 4.0
    assert not budget.reached(ledger, save_seconds=left - steps_and_end - 0.1)
    assert budget.reached(ledger, save_seconds=left - steps_and_end + 0.1)
    with pytest.raises(BadInput, match=f"^{option} .* nothing is left to train with; raise {option}$"):
        budget.check_start(ledger, save_seconds=100.0)


def test_a_run_stops_within_its_budget_with_a_checkpoint_and_goes_on_with_a_larger_one(
    make_run: Callable[..., Path],
) -> None:
    run = make_run(**LONG)
    environment = {"SLOW_STEP": "0.05"}
    done = train(run, *DOLLAR_A_SECOND, "--max-usd", "14", ranks=2, script=SLOW, environment=environment)
    assert done.returncode == 1, done.stderr  # torchrun's
    assert outcome(run) == "stopped", done.stderr
    assert "stopped early by --max-usd; the same command with a larger --max-usd continues" in done.stdout
    first = last_ledger(run)
    assert 7 < first["usd"] <= 14
    stopped = [record for record in read_metrics(run) if record.get("event") == "stopped"]
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    assert [(record["reason"], record["step"]) for record in stopped] == [("--max-usd", state["step"])]
    [began] = [record for record in read_metrics(run) if record.get("event") == "start"]
    assert began["price_per_hour"] == 3600 and began["elapsed_seconds"] == pytest.approx(
        first["ledger"]["start-up"], abs=0.1
    )  # what a killed job's start-up cost
    again = train(run, *DOLLAR_A_SECOND, "--max-usd", "14", ranks=2)
    line = one_line(again)
    assert "--max-usd 14: the run has taken" in line and "nothing is left to train with; raise --max-usd" in line
    hours = (first["elapsed_seconds"] + 10) / 3600
    clock = time.monotonic()
    more = train(run, "--max-hours", f"{hours:.6f}", script=SLOW, environment=environment)
    took = time.monotonic() - clock
    assert more.returncode == 75, more.stderr
    assert f"resuming from {run}/checkpoints/step-{state['step']:08d}" in more.stdout
    second = last_ledger(run)
    assert second["elapsed_seconds"] <= hours * 3600 * 1.01
    assert sum(second["ledger"].values()) == pytest.approx(
        took, rel=0.01, abs=0.5
    )  # the test's clock, which sees a fork and its end as well
    assert sum(second["run_ledger"].values()) == pytest.approx(second["elapsed_seconds"], rel=0.001)
    assert second["ledger"]["training"] > 0.3 * took


# The seed's table "Costs of training in the cloud": GPU, price, micro-batch, seconds of the whole train, without its
# validation, and tokens/s that its trainer printed.
SEED = {
    "8xa100-40gb": (10.32, 13, 13904, 12404, 234480),
    "8xa100-80gb": (14.32, 28, 11532, 9948, 282707),
    "8xh100-80gb": (23.92, 27, 6650, 5738, 490249),
    "8xb200": (39.92, 64, 4190, 3530, 778107),
}
SEED_MODEL = TINY_MODEL | {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12, "n_layers": 12}


@pytest.mark.parametrize("name", SEED)
def test_the_seeds_own_train_times_come_out_within_a_tenth(tmp_path: Path, name: str) -> None:
    price, size, whole, without_validation, printed = SEED[name]
    run = tmp_path / "run"
    run.mkdir()
    (run / "model.json").write_text(
        json.dumps(SEED_MODEL | {"drop_rate": 0.1, "qkv_bias": False, "tie_weights": False})
    )
    batches = {"microbatch_size": size, "validation_interval": 617, "validation_batches": 300}
    data = {"dataset": "gpjt/fineweb-gpt2-tokens", "min_train_tokens": 3260190720}
    (run / "train.json").write_text(json.dumps(batches | data))
    seed = load_run(run, [])
    prices = read_machines(MACHINES, [name])
    [offer] = make_offers(seed, prices, {"gpjt/fineweb-gpt2-tokens": None})
    assert offer.plan is not None and offer.machine.usd_per_hour == price
    assert run_seconds(seed, offer.plan, printed) == pytest.approx(whole, rel=0.1)
    [measured] = measurements(seed.model, offer.machine)
    assert run_seconds(seed, offer.plan, measured.tokens_per_second) == pytest.approx(without_validation, rel=0.1)
    assert measured.tokens_per_second == pytest.approx(offer.plan.train_tokens / without_validation, rel=1e-5)


@pytest.mark.parametrize(
    ("gpu", "size", "tokens_per_second"),
    [
        ("a100-80gb", "124M", 218e3),
        ("a100-80gb", "350M", 80e3),
        ("a100-80gb", "774M", 38.6e3),
        ("h100-80gb", "124M", 468e3),
        ("h100-80gb", "350M", 188e3),
        ("h100-80gb", "1.5B", 47.6e3),
    ],
)
def test_the_roofline_is_what_the_fastest_published_trainer_reached(
    gpu: str, size: str, tokens_per_second: float
) -> None:
    assert roofline(GPT2_SIZES[size], known_gpus()[gpu]) == pytest.approx(tokens_per_second, rel=0.05)


def test_what_is_entered_or_measured_goes_before_the_roofline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2_SIZES["124M"]
    machine = Machine(name="mine", gpu=known_gpus()["b200"], gpus=8, usd_per_hour=1.0)
    assert throughput(config, attrs.evolve(machine, gpus=2)).source == "roofline, a bound, not fitted"
    assert throughput(config, machine).source == "gpjt/ddp-base-model-from-scratch"
    rows = json.loads(MEASUREMENTS.read_text())
    own = rows[-1] | {"trainer": OURS, "tokens_per_second": 5e6}
    monkeypatch.setattr("training.planning.throughput.MEASUREMENTS", tmp_path / "rows.json")
    (tmp_path / "rows.json").write_text(json.dumps([*rows, own]))
    assert attrs.astuple(throughput(config, machine)) == (5e6, OURS)
    assert throughput(GPT2_SIZES["350M"], machine).source != OURS
    entered = attrs.evolve(machine, tokens_per_second=6e6)
    assert attrs.astuple(throughput(config, entered)) == (6e6, "entered in the price list")


def test_a_plan_prices_machines_that_one_does_not_have_and_writes_nothing() -> None:
    run = ROOT / "runs" / "8xa100"
    before = sorted(run.iterdir())
    done = train(run, "--plan", "--set", "microbatch_size=128", "--set", "global_batch_size=1024")
    assert done.returncode == 0, done.stderr
    assert "3,110 steps x 1,048,576 = 3,261,071,360 tokens" in done.stdout
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("8x")}
    assert list(rows) == [*SEED, "8xa100-40gb:"]
    assert re.search(r" 64 x 2 x 8 .* \d+\.\d of 37\.4 .* another trainer +cheapest$", rows["8xa100-40gb"])
    assert "8xa100-40gb: 128 does not fit; start with --set microbatch_size=64" in done.stdout
    assert re.search(r" 128 x 1 x 8 .* of 169\.1 .* another trainer +fastest$", rows["8xb200"])
    assert re.search(r" 262,840 +3\.\d+ +3\d\.\d+ +another trainer ", rows["8xa100-40gb"])
    assert re.search(r"^ +[\d,]+ +0\.\d+ +\d\.\d+ +roofline, a bound$", done.stdout, re.MULTILINE)
    assert "cheapest, fastest: of the machines that were measured (another trainer)" in done.stdout
    assert "uncalibrated" in done.stdout
    assert sorted(run.iterdir()) == before


HUGE = ("--set", "model.emb_dim=3072", "--set", "model.n_layers=200")
NONSENSE = {"date": "2026-01-01", "machines": {"x": {"gpu": "b200", "gpus": 8, "usd_per_hour": 1}}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--machine", "8xa100-40g"], "--machine 8xa100-40g: no such machine; did you mean '8xa100-40gb'?"),
        ([*HUGE], "too big for every machine: under ddp one sequence needs"),
        (
            ["--set", "model.emb_dim=3072", "--set", "model.n_layers=120"],
            "what would, by prediction: --set parallel=fsdp",
        ),
        (
            ["--set", "microbatch_size=2048", "--set", "global_batch_size=16384"],
            "train.json: microbatch_size: got 2048, which needs",
        ),
        (
            ["--set", "microbatch_size=4", "--set", "global_batch_size=20"],
            "train.json: global_batch_size: got 20, which the 8 GPUs of 8xa100-40gb do not divide",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(options: list[str], message: str) -> None:
    assert message in one_line(train(ROOT / "runs" / "8xa100", "--plan", *options))


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
    ],
)
def test_a_price_list_with_nonsense_is_refused(tmp_path: Path, changes: str | dict[str, Any], message: str) -> None:
    path = tmp_path / "prices.json"
    values = json.loads(json.dumps(NONSENSE))
    if isinstance(changes, dict):
        (values if "date" in changes else values["machines"]["x"]).update(changes)
    path.write_text(changes if isinstance(changes, str) else json.dumps(values))
    with pytest.raises(BadInput) as raised:
        read_machines(path, [])
    assert str(raised.value).startswith(f"{path}: ") and message in str(raised.value)


def test_a_machine_that_needs_another_micro_batch_is_told_which(tmp_path: Path) -> None:
    machines = {
        "two": {"gpu": "l4", "gpus": 2, "usd_per_hour": 1},
        "sixteen": {"gpu": "l4", "gpus": 16, "usd_per_hour": 2},
        "three": {"gpu": "l4", "gpus": 3, "usd_per_hour": 3},
    }
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"date": "2026-01-01", "machines": machines}))
    run, prices = load_run(ROOT / "runs" / "8xa100", []), read_machines(path, ["two", "two", "sixteen", "three"])
    offers = make_offers(run, prices, {run.train.data.parts[0].dataset: None})
    lines = describe_offers(run, prices, offers)
    assert lines[0].startswith("machine      two; ") and "world size 2" in lines[2]
    assert [line for line in lines if re.match(r"\w+: (\d|runs)", line.replace(f"{ROOT}/", ""))] == [
        "sixteen: 16 GPUs make no batch of 128 with micro-batches of 16; start with --set microbatch_size=8",
        f"three: {run.directory}/train.json: global_batch_size: got 128, which the 3 GPUs of three do not divide",
    ]


def test_the_cheapest_by_a_roofline_that_is_not_fitted_is_said_to_be() -> None:
    run, prices = load_run(ROOT / "runs" / "8xa100", ["model.n_layers=11"]), read_machines(MACHINES, [])
    lines = describe_offers(run, prices, make_offers(run, prices, {run.train.data.parts[0].dataset: None}))
    assert "cheapest, fastest: by the roofline; no machine has been measured with a network of this shape" in lines
    assert "cheapest: 8xb200, by a roofline that is not fitted to its GPU; of the others 8xa100-40gb, $5.71" in lines


def test_a_measured_machine_is_the_cheapest_and_a_lower_bound_is_only_told() -> None:
    run, prices = load_run(ROOT / "runs" / "8xa100", []), read_machines(MACHINES, [])
    unmeasured = Machine(name="2xh100-80gb", gpu=known_gpus()["h100-80gb"], gpus=2, usd_per_hour=5.98)
    prices = attrs.evolve(prices, machines=(*prices.machines, unmeasured))
    lines = describe_offers(run, prices, make_offers(run, prices, {run.train.data.parts[0].dataset: None}))
    assert [line.split()[0] for line in lines if line.endswith("cheapest")] == ["8xa100-40gb"]
    assert "not measured, and cheaper if it reached its bound: 2xh100-80gb, $5.87" in lines


OWN_GPU = {"gpus": {"weird": {"memory_gib": 12.0, "bf16_tflops": 50, "gb_per_second": 400}}}
OWN_MACHINE = {"date": "2026-01-01", "machines": {"4xweird": {"gpu": "weird", "gpus": 4, "usd_per_hour": 2}}}


def test_a_gpu_is_added_by_a_row_of_the_users_own_file(tmp_path: Path) -> None:
    path, runs = tmp_path / "mine.json", ROOT / "runs" / "8xa100"
    path.write_text(json.dumps(OWN_MACHINE))
    line = one_line(train(runs, "--plan", "--machines", str(path)))
    added = re.search(r"To add a GPU, write (\{.*\}), with its numbers, into the file given by --machines$", line)
    assert added and f"{path}: 4xweird: gpu: unknown GPU 'weird'; " in line
    assert json.loads(added[1])["gpus"]["weird"].keys() == OWN_GPU["gpus"]["weird"].keys()
    path.write_text(json.dumps(OWN_MACHINE | OWN_GPU))
    done = train(runs, "--plan", "--machines", str(path))
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^4xweird +2\.00 +16 x 2 x 4 .* of 11\.4 .* roofline, a bound, not fitted", done.stdout, re.MULTILINE
    )
    options = ("--predict", "weird,l4", "--machines", str(path), "--world-size", "4")
    done = launch.run(ROOT / "find_batch_size.py", str(runs), *options)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^weird +11\.4 +ddp .* 16$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"memory_gib": 12}, "weird: key 'bf16_tflops' is missing; wanted memory_gib, bf16_tflops, gb_per_second"),
        (OWN_GPU["gpus"]["weird"] | {"memory_gib": 0}, "weird: memory_gib: got 0, wanted a number above 0"),
        (OWN_GPU["gpus"]["weird"] | {"memory": 1}, "weird: unknown key 'memory'; did you mean 'memory_gib'?"),
        (3, "weird: got 3, wanted an object"),
    ],
)
def test_a_gpu_with_nonsense_is_refused(tmp_path: Path, row: Any, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OWN_MACHINE | {"gpus": {"weird": row}}))
    with pytest.raises(BadInput) as raised:
        read_machines(path, [])
    assert str(raised.value).startswith(f"{path}: {message}")


def test_tokens_per_second_beyond_the_peak_are_of_another_model(tmp_path: Path) -> None:
    run, prices = load_run(ROOT / "runs" / "8xa100", []), read_machines(MACHINES, ["8xb200"])
    [machine] = prices.machines
    entered = attrs.evolve(prices, machines=(attrs.evolve(machine, tokens_per_second=1e9),))
    with pytest.raises(BadInput, match=r"8xb200: tokens_per_second: got 1e\+09, more than the 24,2"):
        make_offers(run, entered, {run.train.data.parts[0].dataset: None})


@pytest.mark.parametrize(("validation", "checkpoint"), [(617, 617), (4, 6), (100, 7), (1, 5)])
def test_a_plan_counts_the_validations_that_a_run_makes(validation: int, checkpoint: int) -> None:
    run, prices = load_run(ROOT / "runs" / "8xa100", []), read_machines(MACHINES, ["8xb200"])
    train_config = run.train.replace(validation_interval=validation, checkpoint_interval=checkpoint)
    run = attrs.evolve(run, train=train_config)
    [offer] = make_offers(run, prices, {run.train.data.parts[0].dataset: None})
    assert offer.plan is not None
    steps, plan = offer.plan.steps, offer.plan
    job: Any = SimpleNamespace(run=run, last_step=steps)
    due = sum(validation_due(job, step) for step in range(steps + 1))
    expected = (plan.train_tokens + due * plan.validation_sequences * 1024 / 3) / 1e6
    assert run_seconds(run, plan, 1e6) - START_UP_SECONDS == pytest.approx(expected)


@pytest.mark.parametrize(("checkpoint", "validation"), [(3, 4), (4, 4), (6, 4), (7, 100), (1, 5)])
def test_what_is_due_is_counted_without_walking_over_the_steps(checkpoint: int, validation: int) -> None:
    for last in range(1, 30):
        for first in range(1, last + 1):
            saves = [step for step in range(first, last + 1) if step % checkpoint == 0 or step == last]
            validations = [step for step in range(first, last + 1) if step % validation == 0 or step in saves]
            assert count_due(first, last, checkpoint) == len(saves)
            assert count_due(first, last, checkpoint, validation) == len(validations)


def test_a_validation_that_does_not_fit_is_not_begun(clock: list[float]) -> None:
    run = load_run(ROOT / "runs" / "8xa100", ["validation_interval=10", "checkpoint_interval=40"])
    ledger = ledger_of(clock)  # of 23 s; two steps and the end take 7, a validation 5
    job = SimpleNamespace(run=run, budget=Budget(max_hours=33 / 3600), last_step=100)
    loop: Any = SimpleNamespace(job=job, ledger=ledger, saver=SimpleNamespace(in_flight=False), _save_seconds=0.0)
    loop.state = SimpleNamespace(position=SimpleNamespace(step=8))
    assert not Loop._budget_reached(loop)
    loop.state.position.step = 9
    assert Loop._budget_reached(loop)
    job.plan = make_plan(run, 8)
    share = job.plan.validation_sequences / 128  # of a step's sequences; its longest took 2 s
    assert Loop._first_validation_seconds(loop) == pytest.approx(2.0 * share / 3)


@pytest.mark.parametrize("text", ["14,32", "$14", "nan", "inf", "0", "-1"])
def test_a_limit_that_is_no_number_is_refused_in_plain_words(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"wanted a number above 0, such as 14\.32"):
        number(0, above=True, example="14.32")(text)
