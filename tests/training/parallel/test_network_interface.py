"""Nodes meet whatever their own names resolve to, train with the bits of one node, and say why where they cannot."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed

from tests.conftest import metrics, train
from tests.machines import Hosts, Machine
from training.parallel import network_interface

SECONDS = 300  # a hang


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "master"),
    [
        (("own name", "own name"), "10.77.0.1"),
        (("nothing", "nothing"), "10.77.0.1"),
        (("own name", "good"), "a"),  # a loopback address on the first node itself
    ],
)
def test_nodes_meet_whatever_their_names_are(
    make_run: Callable[..., Path], machines: tuple[Machine, Machine], hosts: tuple[Hosts, Hosts], master: str
) -> None:
    alone, together = make_run("alone"), make_run("together")
    assert train(alone, "--hash-every", "1").returncode == 0
    assert train(together, "--hash-every", "1", "--max-steps", "4").returncode == 0
    nodes = [
        node.train(together, "--hash-every", "1", master=master, hosts=known)
        for node, known in zip(machines, hosts, strict=True)
    ]
    for node in nodes:
        output, errors = node.communicate(timeout=SECONDS)
        assert node.returncode == 0, output + errors
    assert metrics(together, "state_sha256") == metrics(alone, "state_sha256")


INTERFACES = """
import sys
from training.parallel.network_interface import address_towards, interface_with

print([interface_with(address_towards(host)) for host in sys.argv[1:]])
"""


def test_a_node_finds_its_interface_by_the_route(machines: tuple[Machine, Machine]) -> None:
    hosts = ["10.77.0.1", "a", machines[1].address, "10.9.9.9", "no-such-name", "127.0.0.1", "::1"]
    process = machines[1].start(sys.executable, "-c", INTERFACES, *hosts)
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    cable = machines[1].cable
    assert output == f"{[cable, cable, cable, None, None, None, None]}\n"  # no route, no such name, loopback, IPv6


@pytest.mark.parametrize(
    ("addresses", "configured", "chosen"),
    [
        (["", ""], "", (None, None)),  # two torchruns on one machine
        (["10.77.0.1", ""], "", ("eth7", "=eth7")),
        (["10.77.0.1", ""], "NCCL_SOCKET_IFNAME=ib0", ("eth7", None)),
    ],
)
def test_all_ranks_learn_of_an_address_that_other_nodes_reach(
    addresses: list[str],
    configured: str,
    chosen: tuple[str | None, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "nccl.conf").write_text(configured)
    for name in (network_interface.GLOO_VARIABLE, network_interface.NCCL_VARIABLE):
        monkeypatch.setenv(name, "set, for monkeypatch to restore")
        monkeypatch.delenv(name)
    told = {"RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "first", "NCCL_CONF_FILE": str(tmp_path / "nccl.conf")}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(network_interface, "NCCL_FILES", ())
    store = torch.distributed.HashStore()
    routes = {"first": "", addresses[0]: "10.77.0.9"}
    monkeypatch.setattr(network_interface, "address_towards", lambda host: routes[host] or None)
    monkeypatch.setattr(network_interface, "interface_with", {"10.77.0.9": "eth7", None: None}.__getitem__)
    store.set("address 1", addresses[1])
    store.set("reachable address", next(filter(None, addresses), ""))
    network_interface.choose_interface(store, 1, 2)
    found = tuple(map(os.environ.get, (network_interface.GLOO_VARIABLE, network_interface.NCCL_VARIABLE)))
    assert found == chosen
