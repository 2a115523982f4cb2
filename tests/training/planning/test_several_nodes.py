"""Several nodes in --plan: their price, and tokens/s by simulation."""

import re

from tests.conftest import ROOT, train
from training.config.train_config import load_run
from training.planning.estimate import make_estimate
from training.planning.price_list import MACHINES, read_machines
from training.planning.throughput import Network

RUN = ROOT / "runs" / "8xa100"
LENGTHS = {"gpjt/fineweb-gpt2-tokens": None}


def test_two_nodes_cost_twice_as_much_an_hour_and_are_less_than_twice_as_fast() -> None:
    run, prices = load_run(RUN, []), read_machines(MACHINES, ["8xh100-80gb"])
    [one] = make_estimate(run, prices, LENGTHS).offers
    [two] = make_estimate(run, prices, LENGTHS, Network(nodes=2, link=50.0)).offers
    [slow] = make_estimate(run, prices, LENGTHS, Network(nodes=2, link=1.0)).offers
    assert two.machine.name == "2 x 8xh100-80gb"
    assert (two.machine.gpus, two.machine.usd_per_hour) == (16, 2 * one.machine.usd_per_hour)
    speeds = [offer.throughputs[0].tokens_per_second for offer in (slow, one, two)]
    assert speeds[0] < speeds[1] < speeds[2] < 2 * speeds[1]
    assert not two.measured


def test_fsdp_over_a_slow_link_waits_for_weights_too() -> None:
    prices, network = read_machines(MACHINES, ["8xh100-80gb"]), Network(nodes=2, link=1.0)
    offers = {
        parallel: make_estimate(load_run(RUN, [f"parallel={parallel}"]), prices, LENGTHS, network).offers[0]
        for parallel in ("hsdp", "fsdp")
    }
    assert offers["fsdp"].hours() > offers["hsdp"].hours()


def test_the_plan_prices_nodes_and_says_that_it_is_a_simulation() -> None:
    done = train(RUN, "--plan", "--machine", "8xh100-80gb", "--nodes", "2", "--node-link", "50")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^2 x 8xh100-80gb +47\.84 .*simulation", done.stdout, re.MULTILINE)
    assert "50 GB/s between nodes" in done.stdout
