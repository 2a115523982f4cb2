"""Rendezvous of several nodes: the generation of a job's processes, and the network interface between the nodes.

A generation are the processes that torchrun has started together. On one node torchrun counts restarts. On several each
torchrun counts its own, and none counts that a node has come or gone, while the store, where the processes meet, may be
the same and keep what earlier ones wrote.

The interface is the one on the route to the first node. Left to themselves, gloo takes the interface of the machine's
own name, which many systems map to 127.0.1.1, and NCCL the first that is up: connections between nodes then fail, or
wait until a timeout.
"""

import array
import hashlib
import ipaddress
import os
import socket
import struct
import sys
import time
from datetime import timedelta
from fcntl import ioctl
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist

POLL_SECONDS = 0.1
GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
NCCL_FILES = ("/etc/nccl.conf", "~/.nccl.conf")  # where NCCL reads its variables, too
SIOCGIFADDR = 0x8915  # Linux: address of an interface, netdevice(7)
IFREQ = struct.Struct("16s2xH4s16x")  # struct ifreq with a sockaddr_in: name, port, address


def agree_on_generation(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that all ranks of a generation have, and no other. Call it on every rank.

    Each rank writes a name of its own. Rank 0 proposes those that it reads, which may be an earlier process's; every
    rank votes for a proposal that has its own; rank 0 decides once all have voted for the same.
    `store`: of the rendezvous (dist.Store). Raises dist.DistError where ranks are missing for so long.
    """
    own = uuid4().hex
    store.set(f"process {rank}", own)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if rank == 0 and (processes := _read(store, "process", world_size)):
            store.set("proposal", " ".join(processes))
        if proposal := _get(store, "proposal"):
            processes, name = proposal.split(), hashlib.sha256(proposal.encode()).hexdigest()[:16]
            if len(processes) == world_size and processes[rank] == own:
                store.set(f"vote {rank}", name)
                if rank == 0 and set(_read(store, "vote", world_size)) == {name}:
                    store.set("generation", name)
                if _get(store, "generation") == name:
                    return name
        time.sleep(POLL_SECONDS)
    raise dist.DistStoreError(f"not all of {world_size} ranks have met within {timeout}")


def choose_interface(store: Any, rank: int, world_size: int) -> None:
    """Let gloo and NCCL use the interface between several nodes, unless it is configured otherwise.

    A node that knows the first one by a loopback address, as that one itself may, takes the route to another node.
    Call it on every rank, before the process group connects. `store`: the rendezvous' (dist.Store).
    """
    address = address_towards(os.environ["MASTER_ADDR"])
    store.set(f"address {rank}", address or "")
    if rank == 0:
        addresses = [store.get(f"address {each}").decode() for each in range(world_size)]
        store.set("reachable address", next(filter(None, addresses), ""))
    reachable = store.get("reachable address").decode()  # none: one machine, or IPv6
    name = interface_with(address or address_towards(reachable)) if reachable else None
    if name is None:
        return
    os.environ.setdefault(GLOO_VARIABLE, name)
    # The environment would outweigh a file of NCCL's variables that names its interface.
    files = [os.environ.get("NCCL_CONF_FILE"), *NCCL_FILES]
    paths = [Path(file).expanduser() for file in files if file]
    if not any(NCCL_VARIABLE in path.read_text(errors="replace") for path in paths if path.is_file()):
        os.environ.setdefault(NCCL_VARIABLE, f"={name}")  # =: that name, and no other that begins so


def address_towards(host: str) -> str | None:
    """Return this machine's IPv4 address on the route to a host; None without a route, or for the machine itself."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.connect((host, 9))  # sends nothing; any port
            own: str = udp.getsockname()[0]
    except OSError:
        return None
    return None if ipaddress.ip_address(own).is_loopback else own


def interface_with(address: str | None) -> str | None:
    """Return the name of the interface with an IPv4 address; None where it cannot be told."""
    if address is None or sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for _, name in socket.if_nameindex():
            request = array.array("B", IFREQ.pack(name.encode(), 0, b""))
            try:
                ioctl(udp, SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(IFREQ.unpack(request)[2]) == address:
                return name
    return None


def _read(store: Any, key: str, world_size: int) -> list[str]:
    """Return every rank's value; none where one is missing."""
    keys = [f"{key} {rank}" for rank in range(world_size)]
    return [value.decode() for value in store.multi_get(keys)] if store.check(keys) else []


def _get(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
