"""Simulation of several nodes: bytes over links, what computation hides, and time lost to failures."""

import attrs
import pytest
from scale import Cluster, lost_share, simulate

from model.config import GPT2_SIZES, parameter_count
from training.planning.several_nodes import BACKWARD_SHARE, Links, step_time

SMALL, GRADIENT = GPT2_SIZES["124M"], 4 * parameter_count(GPT2_SIZES["124M"])
LINKS = Links(node=10.0, inside=100.0, latency_us=0.0)
CLUSTER = Cluster(links=LINKS, failures_per_gpu_hour=1e-4, restart_seconds=60.0)


def test_one_node_sends_nothing_to_others_and_two_the_whole_gradient() -> None:
    one, two, four = (simulate(SMALL, CLUSTER, nodes, 512) for nodes in (1, 2, 4))
    assert (one.across, two.across, four.across) == pytest.approx((0.0, GRADIENT / 1e10, 1.5 * GRADIENT / 1e10))
    assert one.inside == two.inside == pytest.approx(2 * 7 / 8 * GRADIENT / 1e11)
    assert two.compute == pytest.approx(one.compute / 2)


def test_a_slow_link_is_hidden_by_the_backward_pass_at_most() -> None:
    slow = simulate(SMALL, attrs.evolve(CLUSTER, links=attrs.evolve(LINKS, node=0.1)), 2, 512)
    assert slow.exposed == pytest.approx(slow.inside + slow.across - BACKWARD_SHARE * slow.compute)
    accumulated = step_time(parameter_count(SMALL), Links(node=0.1), (2, 8), compute=1.0, accumulation=4)
    assert accumulated.inside + accumulated.across - accumulated.exposed == pytest.approx(BACKWARD_SHARE / 4)


def test_a_gpu_computes_whole_sequences() -> None:
    assert simulate(SMALL, CLUSTER, 4, 33).compute == simulate(SMALL, CLUSTER, 4, 64).compute


def test_failures_cost_half_an_interval_and_the_restart() -> None:
    assert lost_share(CLUSTER, 100, 600.0) == pytest.approx(0.01 / 3600 * (300 + 60))
