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

from common.errors import BadInput

VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}  # and what makes the name an exact one, not a prefix
SIOCGIFADDR = 0x8915  # Linux: address of an interface, netdevice(7)
IFREQ = struct.Struct("16s2xH4s16x")  # struct ifreq with a sockaddr_in: name, port, address


def choose_interface() -> None:
    """On several nodes, let gloo and NCCL use the interface towards MASTER_ADDR, unless the environment names one.

    Raises BadInput where MASTER_ADDR has no route, or is a loopback address, which other nodes cannot reach.
    """
    several = os.environ.get("LOCAL_WORLD_SIZE") not in (None, os.environ.get("WORLD_SIZE"))  # not every launcher tells
    if not several or all(name in os.environ for name in VARIABLES):
        return
    name = interface_towards(os.environ["MASTER_ADDR"])
    for variable, exactly in VARIABLES.items():
        if name is not None:
            os.environ.setdefault(variable, exactly + name)


def interface_towards(host: str) -> str | None:
    """Return the name of this machine's IPv4 interface on the route to a host; None where it cannot be told.

    Raises BadInput as `choose_interface` does.
    """
    where = f"MASTER_ADDR {host}, the first node's address"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.connect((host, 9))  # sends nothing; any port
            own = udp.getsockname()[0]
    except OSError as error:
        raise BadInput(
            f"{where}: {error.strerror or error}; start torchrun with an address that this node reaches", alone=True
        ) from error
    if ipaddress.ip_address(own).is_loopback:
        raise BadInput(
            f"{where}, is {own} here, which other nodes cannot reach; start torchrun on all nodes with the first "
            "node's address in their network (--master-addr; with --rdzv-backend=c10d: --rdzv-endpoint, --local-addr)",
            alone=True,
        )
    return _interface_of(own) if sys.platform == "linux" else None


def _interface_of(address: str) -> str | None:
    """Return the interface with an IPv4 address."""
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
