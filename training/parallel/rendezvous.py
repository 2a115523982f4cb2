"""Rendezvous of several nodes: the generation of a job's processes, and the network interface that they use.

A generation consists of the processes that torchrun has started together. On one node, torchrun counts restarts. On
several nodes, each torchrun counts only its own restarts, and no count changes when a node joins or leaves. The store
through which the processes find each other may be an old one that still contains what earlier processes have written.

This module normally chooses the interface on the route to the first node. By default, gloo would resolve
the machine's own name, which gives 127.0.1.1 on many systems, and use the interface with that address. NCCL would use
the first interface that is up. With these defaults, connections between nodes could fail, or wait until a timeout.
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
NCCL_FILES = ("/etc/nccl.conf", "~/.nccl.conf")  # NCCL also reads its variables from these files
SIOCGIFADDR = 0x8915  # Linux: address of an interface, netdevice(7)
IFREQ = struct.Struct("16s2xH4s16x")  # struct ifreq with a sockaddr_in: name, port, address


def agree_on_generation(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that all ranks of this generation share, and that no other process has. Call it on every rank.

    Each rank writes a unique process name to the store. Rank 0 proposes the list of names that it reads, which may
    still be the names of earlier processes. Every rank votes for a proposal that contains its own name. When all ranks
    have voted for the same proposal, rank 0 decides. `store` is the dist.Store of the rendezvous. Raises dist.DistError
    if ranks are still missing after the timeout.
    """
    process_name = uuid4().hex
    store.set(f"process {rank}", process_name)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if rank == 0 and (processes := _read(store, "process", world_size)):
            store.set("proposal", " ".join(processes))
        if proposal := _get(store, "proposal"):
            processes, name = proposal.split(), hashlib.sha256(proposal.encode()).hexdigest()[:16]
            if len(processes) == world_size and processes[rank] == process_name:
                store.set(f"vote {rank}", name)
                if rank == 0 and set(_read(store, "vote", world_size)) == {name}:
                    store.set("generation", name)
                if _get(store, "generation") == name:
                    return name
        time.sleep(POLL_SECONDS)
    raise dist.DistStoreError(f"not all of the {world_size} ranks have connected within {timeout}")


def choose_interface(store: Any, rank: int, world_size: int) -> None:
    """Make gloo and NCCL use the interface that connects the nodes, unless the user has configured another one.

    The interface is normally the one on the route to the first node. Where the first node's name resolves to a loopback
    address, which can happen on the first node itself, the interface on the route to another node is used instead. Call
    this on every rank, before the process group connects. `store` is the dist.Store of the rendezvous.
    """
    address = address_towards(os.environ["MASTER_ADDR"])
    store.set(f"address {rank}", address or "")
    if rank == 0:
        addresses = [store.get(f"address {number}").decode() for number in range(world_size)]
        store.set("reachable address", next(filter(None, addresses), ""))
    reachable = store.get("reachable address").decode()  # empty on a single machine or with IPv6
    name = interface_with(address or address_towards(reachable)) if reachable else None
    if name is None:
        return
    os.environ.setdefault(GLOO_VARIABLE, name)
    # If one of NCCL's configuration files names an interface, nothing is set here, because the environment would
    # override the file.
    files = [os.environ.get("NCCL_CONF_FILE"), *NCCL_FILES]
    paths = [Path(file).expanduser() for file in files if file]
    if not any(NCCL_VARIABLE in path.read_text(errors="replace") for path in paths if path.is_file()):
        os.environ.setdefault(NCCL_VARIABLE, f"={name}")  # without the "=", NCCL would treat the name as a prefix


def address_towards(host: str) -> str | None:
    """Return this machine's IPv4 address on the route to a host.

    Return None if there is no route, or if the host is this machine.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.connect((host, 9))  # sends nothing, so any port can be used
            address: str = udp.getsockname()[0]
    except OSError:
        return None
    return None if ipaddress.ip_address(address).is_loopback else address


def interface_with(address: str | None) -> str | None:
    """Return the name of the interface with this IPv4 address, or None if it cannot be determined."""
    if address is None or sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for _, name in socket.if_nameindex():
            request = array.array("B", IFREQ.pack(name.encode(), 0, b""))
            try:
                ioctl(udp, SIOCGIFADDR, request)
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(IFREQ.unpack(request)[2]) == address:
                return name
    return None


def _read(store: Any, key: str, world_size: int) -> list[str]:
    """Return the values of all ranks, or an empty list if any value is missing."""
    keys = [f"{key} {rank}" for rank in range(world_size)]
    return [value.decode() for value in store.multi_get(keys)] if store.check(keys) else []


def _get(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
