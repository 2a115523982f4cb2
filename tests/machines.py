"""Two emulated machines, each with its own network, host name, processes and /etc/hosts, joined by a cable.

This works only on Linux and as root.
"""

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from tests.launch import ROOT

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")  # starts one rank by default
CLONE_NEWNET = 0x40000000  # a flag of setns
# The names in /etc/hosts. "own name" means only the machine's own name, with the address 127.0.1.1, as on Debian.
Hosts = Literal["good", "own name", "nothing"]
# Turns the process that runs this script into a machine, and then runs the command in the script's arguments. The
# machine has its own mounts, and all its processes die with it.
SCRIPT = """
mount --make-rprivate / && mount -t proc proc /proc && hostname "$1" && mount --bind "$2" /etc/hosts || exit 98
if [ -n "$3" ]; then mount --bind "$3" "$4" || exit 98; fi
shift 4
exec "$@"
"""


@attrs.frozen
class Machine:
    """An emulated machine."""

    name: str
    address: str  # in the network that joins both machines
    namespace: str
    cable: str  # the network interface
    folder: Path  # for the files of the machine

    @property
    def disk(self) -> Path:
        """The folder that the machine sees at the path of `own_disk`."""
        return self.folder / f"disk-{self.name}"

    def start(
        self,
        *command: str,
        hosts: Hosts = "good",
        own_disk: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command in the repository's root. `own_disk` is a run directory that is copied for the machine."""
        text = {"good": "10.77.0.1 a\n10.77.0.2 b\n", "own name": f"127.0.1.1 {self.name}\n", "nothing": ""}[hosts]
        file = self.folder / f"hosts-{self.name}"
        file.write_text("127.0.0.1 localhost\n" + text)
        mounts = ("", "")
        if own_disk is not None:
            mounts = (str(self.disk), str(own_disk))
            self.disk.mkdir(exist_ok=True)
            for name in ("model.json", "train.json"):
                if not (self.disk / name).exists():
                    shutil.copy(own_disk / name, self.disk)
        enter = ("nsenter", f"--net=/run/netns/{self.namespace}")
        isolate = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child")
        return subprocess.Popen(
            [*enter, *isolate, "bash", "-c", SCRIPT, "machine", self.name, str(file), *mounts, *command],
            cwd=ROOT,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def train(
        self, run: Path, *options: str, master: str, script: Path | str = "train.py", ranks: int = 1, **keys: Any
    ) -> subprocess.Popen[str]:
        """Start torchrun on this machine, as one of two nodes.

        `master` is the address or name of the first machine; `keys` are keyword arguments of `start`.
        """
        node = ("--nnodes=2", f"--node_rank={'ab'.index(self.name)}", f"--nproc_per_node={ranks}")
        meeting = (*node, f"--master-addr={master}", "--master-port=29500")
        return self.start(*TORCHRUN, *meeting, str(script), str(run), *options, **keys)

    def plug(self, *, cable: bool) -> None:
        """Plug the cable in, or unplug it."""
        _ip("-n", self.namespace, "link", "set", self.cable, "up" if cable else "down")

    def listen(self) -> socket.socket:
        """Return a socket that listens in the emulated machine's network, so that this process can serve there."""
        libc, sockets = ctypes.CDLL(None, use_errno=True), []

        def create() -> None:  # in a separate thread, because this thread moves to that network permanently
            with Path(f"/run/netns/{self.namespace}").open() as namespace:
                assert libc.setns(namespace.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            sockets.append(socket.create_server((self.address, 0)))

        thread = threading.Thread(target=create)
        thread.start()
        thread.join()
        return sockets[0]

    def sent_bytes(self) -> int:
        """Return the number of bytes that this machine has sent over the cable."""
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "cat", "/proc/net/dev"]
        text = subprocess.run(enter, check=True, capture_output=True, text=True).stdout
        [counters] = [line.split(":")[1] for line in text.splitlines() if line.strip().startswith(f"{self.cable}:")]
        return int(counters.split()[8])


Machines = tuple[Machine, Machine]


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    """Create the machines a and b, or skip the test: only root can create a network."""
    if sys.platform != "linux" or os.geteuid() or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        pytest.skip("needs Linux, root, ip, nsenter and unshare: machines are network namespaces")
    names = [f"lockstep-{os.getpid()}-{name}" for name in "ab"]
    cables = [f"ls{os.getpid()}{name}" for name in "ab"]
    first, second = names
    if subprocess.run(["ip", "netns", "add", first], check=False, capture_output=True).returncode:
        pytest.skip("needs network namespaces, which root cannot create on this system")
    try:
        _ip("netns", "add", second)
        for name in names:
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", first, "link", "add", cables[0], "type", "veth", "peer", "name", cables[1], "netns", second)
        machines = []
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
            _ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", cable)
            machines.append(Machine("ab"[number - 1], f"10.77.0.{number}", name, cable, folder))
            machines[-1].plug(cable=True)
        yield machines[0], machines[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
