"""Nodes meet whatever their own names resolve to, train with the bits of one node, and say why where they cannot."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import metrics, train
from tests.machines import Hosts, Machine, two_machines

SECONDS = 300  # a hang


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    with two_machines(tmp_path) as pair:
        yield pair


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["own name", "nothing"])
def test_nodes_meet_by_the_first_ones_address_whatever_their_names_are(
    make_run: Callable[..., Path], machines: tuple[Machine, Machine], hosts: Hosts
) -> None:
    alone, together = make_run("alone"), make_run("together")
    assert train(alone, "--hash-every", "1").returncode == 0
    assert train(together, "--hash-every", "1", "--max-steps", "4").returncode == 0
    nodes = [node.train(together, "--hash-every", "1", master="10.77.0.1", hosts=hosts) for node in machines]
    for node in nodes:
        output, errors = node.communicate(timeout=SECONDS)
        assert node.returncode == 0, output + errors
    assert metrics(together, "state_sha256") == metrics(alone, "state_sha256")


@pytest.mark.slow
def test_an_address_that_other_nodes_cannot_reach_is_refused_in_one_line(
    make_run: Callable[..., Path], machines: tuple[Machine, Machine]
) -> None:
    run = make_run()
    first = machines[0].train(run, master="a", hosts="own name")
    second = machines[1].train(run, master="a")
    errors = [node.communicate(timeout=SECONDS)[1] for node in (first, second)]
    assert first.returncode == 1 and second.returncode != 0
    assert "train.py: MASTER_ADDR a, the first node's address, is 127.0.0.1 here, which other nodes" in errors[0]
    assert not (run / "metrics.jsonl").exists()


def test_a_node_finds_its_interface_by_the_route(machines: tuple[Machine, Machine]) -> None:
    code = "import sys; from training.parallel.network_interface import interface_towards as f; print(f(sys.argv[1]))"
    for host, said in (("10.77.0.1", "b"), ("10.77.0.2", "b"), ("10.9.9.9", "Network is unreachable"), ("x", "x, the")):
        output, errors = machines[1].start(sys.executable, "-c", code, host).communicate(timeout=SECONDS)
        assert output.strip().endswith(said) or said in errors
