"""Nodes connect, no matter what their own names resolve to, and then train with the same bits as one node.

If nodes cannot connect, the error explains why. Ranks that were started together agree on a name for their generation,
no matter what earlier ranks have left in the store.
"""

import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.conftest import MakeRun, complete, metrics
from tests.machines import Hosts, Machine
from training.parallel import rendezvous

SECONDS = 300  # a process that takes longer counts as hanging
MINUTE = timedelta(minutes=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "master"),
    [
        (("own name", "own name"), "10.77.0.1"),
        (("nothing", "nothing"), "10.77.0.1"),
        (("own name", "good"), "a"),  # on the first node itself, "a" is a loopback address
    ],
)
def test_nodes_connect_whatever_their_names(
    make_run: MakeRun, machines: tuple[Machine, Machine], hosts: tuple[Hosts, Hosts], master: str
) -> None:
    alone, together = make_run("alone"), make_run("together")
    complete(alone, "--hash-every", "1")
    complete(together, "--hash-every", "1", "--max-steps", "4")
    nodes = [
        node.train(together, "--hash-every", "1", master=master, hosts=host_names)
        for node, host_names in zip(machines, hosts, strict=True)
    ]
    for node in nodes:
        output, errors = node.communicate(timeout=SECONDS)
        assert node.returncode == 0, output + errors
    assert metrics(together, "state_sha256") == metrics(alone, "state_sha256")


INTERFACES = """
import sys
from training.parallel.rendezvous import address_towards, interface_with

print([interface_with(address_towards(host)) for host in sys.argv[1:]])
"""


def test_the_route_determines_the_interface(machines: tuple[Machine, Machine]) -> None:
    hosts = ["10.77.0.1", "a", machines[1].address, "10.9.9.9", "no-such-name", "127.0.0.1", "::1"]
    process = machines[1].start(sys.executable, "-c", INTERFACES, *hosts)
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    cable = machines[1].cable
    # The last four hosts: no route, no such name, a loopback address, and IPv6
    assert output == f"{[cable, cable, cable, None, None, None, None]}\n"


@pytest.mark.parametrize(
    ("addresses", "configured", "expected"),
    [
        (["", ""], "", (None, None)),  # two torchruns on one machine
        (["10.77.0.1", ""], "", ("eth7", "=eth7")),
        (["10.77.0.1", ""], "NCCL_SOCKET_IFNAME=ib0", ("eth7", None)),
    ],
)
def test_all_ranks_learn_a_reachable_address(
    addresses: list[str],
    configured: str,
    expected: tuple[str | None, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "nccl.conf").write_text(configured)
    for name in (rendezvous.GLOO_VARIABLE, rendezvous.NCCL_VARIABLE):
        monkeypatch.setenv(name, "set, for monkeypatch to restore")
        monkeypatch.delenv(name)
    variables = {
        "RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "first",
        "NCCL_CONF_FILE": str(tmp_path / "nccl.conf"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "NCCL_FILES", ())
    store = dist.HashStore()
    routes = {"first": "", addresses[0]: "10.77.0.9"}
    monkeypatch.setattr(rendezvous, "address_towards", lambda host: routes[host] or None)
    monkeypatch.setattr(rendezvous, "interface_with", {"10.77.0.9": "eth7", None: None}.__getitem__)
    store.set("address 1", addresses[1])
    store.set("reachable address", next(filter(None, addresses), ""))
    rendezvous.choose_interface(store, 1, 2)
    interfaces = tuple(map(os.environ.get, (rendezvous.GLOO_VARIABLE, rendezvous.NCCL_VARIABLE)))
    assert interfaces == expected


def agree(store: Any, world_size: int, draw: random.Random) -> list[str]:
    """Let ranks join at random times, and return the name that each rank gets."""

    def join(rank: int, seconds: float) -> str:
        time.sleep(seconds)
        return rendezvous.agree_on_generation(store, rank, world_size, MINUTE)

    delays = [draw.uniform(0, 0.5) for _ in range(world_size)]
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(join, range(world_size), delays))


def test_each_generation_has_its_own_name() -> None:
    draw, store = random.Random(5), dist.HashStore()  # type: ignore[attr-defined]  # missing from its __all__
    names = []
    for world_size in (4, 4, 2, 4, 3, 1):  # nodes that leave do not remove their entries
        [name] = set(agree(store, world_size, draw))
        names.append(name)
    assert len(set(names)) == len(names)


def test_missing_ranks_cause_a_timely_error() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(dist.DistStoreError, match="not all of the 2 ranks have connected within 0:00:01"):
        rendezvous.agree_on_generation(store, 0, 2, timedelta(seconds=1))
