"""Network interface between nodes: the one on the route to the first node.

Left to themselves, gloo takes the interface of the machine's own name, which many systems map to 127.0.1.1, and NCCL
the first that is up: connections between nodes then fail, or wait until a timeout.
"""

import array
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
NCCL_FILES = ("/etc/nccl.conf", "~/.nccl.conf")  # where NCCL reads its variables, too
SIOCGIFADDR = 0x8915  # Linux: address of an interface, netdevice(7)
IFREQ = struct.Struct("16s2xH4s16x")  # struct ifreq with a sockaddr_in: name, port, address


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
    if not _configures_nccl():
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
    from fcntl import ioctl  # not on every system

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


def _configures_nccl() -> bool:
    """Return whether a file of NCCL's variables names its interface; the environment would outweigh that."""
    files = [os.environ.get("NCCL_CONF_FILE"), *NCCL_FILES]
    paths = [Path(file).expanduser() for file in files if file]
    return any(NCCL_VARIABLE in path.read_text(errors="replace") for path in paths if path.is_file())
