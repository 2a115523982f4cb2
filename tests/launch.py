"""Start scripts, alone or under torchrun, as forks of a process that has imported torch: in a tenth of a second each.

Everything after the imports is real: the script runs as `__main__`, torchrun's own agent starts, watches and ends the
ranks, each rank is a process in a session of its own, with gloo between them. What a fork cannot show, such as imports
on a fresh interpreter or another hash seed per rank, is left to the tests that start commands as a user does.
"""

import atexit
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
IMPORTED_ONCE = [
    "torch._dynamo",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "training.session",
    "evaluation.smoke",
]
TIMEOUT_SECONDS = 180
MESSAGE_BYTES = 1 << 20

_address = ""  # of the server's socket, in the server and in all that it forks


def run(
    script: Path, *arguments: str, ranks: int = 1, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python script from the repository's root to its end; under torchrun for more than one rank."""
    command = [str(script), *arguments]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        streams = (output.fileno(), errors.fileno())
        process = Fork(_start_server(), command, {**os.environ, **(environment or {})}, streams, ranks)
        try:
            status = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(command, status, *texts)


class Fork:
    """A process that the server forks; looks like a subprocess.Popen of `python COMMAND`, in a session of its own."""

    def __init__(
        self, address: str, command: list[str], environment: dict[str, str], streams: tuple[int, int], ranks: int = 1
    ):
        # `streams`: file descriptors of its output and errors
        self._command = command
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(address)
        request = {"command": command, "environment": environment, "ranks": ranks}
        socket.send_fds(self._connection, [json.dumps(request).encode()], streams)
        self.pid = int(self._connection.recv(MESSAGE_BYTES))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process lives."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(MESSAGE_BYTES))
            except (BlockingIOError, TimeoutError) as error:
                raise subprocess.TimeoutExpired(self._command, timeout or 0) from error
        return self.returncode


@cache
def _start_server() -> str:
    """Start this process's server and return its address."""
    folder = tempfile.TemporaryDirectory(prefix="launch-")
    address = f"{folder.name}/socket"
    server = subprocess.Popen(
        [sys.executable, "-c", f"from tests import launch; launch.serve({address!r})"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None and server.stdout is not None

    def stop() -> None:
        server.stdin.close()
        server.wait()
        folder.cleanup()

    atexit.register(stop)
    assert server.stdout.readline() == b"ready\n"
    return address


def serve(address: str) -> None:
    """Fork a process for each request, and answer with its pid and later its exit status, until stdin ends.

    No other thread runs here, so no lock is held when a process is forked.
    """
    global _address  # noqa: PLW0603  # for what is forked here, and from there again
    _address = address
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is listener:
                _answer(listener, selector)
            else:
                pid, connection = key.data
                selector.unregister(key.fd)
                os.close(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with connection:
                    try:
                        connection.send(str(status).encode())
                    except BrokenPipeError:
                        continue  # nobody asks


def _answer(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    connection, _ = listener.accept()
    text, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
    pid = os.fork()
    if pid == 0:
        for key in list(selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
                key.data[1].close()
        selector.close()
        listener.close()
        connection.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number, stream in enumerate([nothing, *streams]):
            os.dup2(stream, number)
            os.close(stream)
        os.setsid()
        _become(**json.loads(text))
    for stream in streams:
        os.close(stream)
    connection.send(str(pid).encode())
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))


def _become(command: list[str], environment: dict[str, str], ranks: int) -> NoReturn:
    """Run a script, or torchrun with it, as Python would from its start, and end this process."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [str(Path(command[0]).parent), str(ROOT)]
    from training import chart

    chart.subprocess = SimpleNamespace(Popen=lambda args, **_: Fork(_address, args[1:], dict(os.environ), (1, 2)))
    status: Any = 0
    try:
        if ranks > 1:
            _torchrun(command, ranks)
        elif command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001  # as the interpreter would
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def _torchrun(command: list[str], ranks: int) -> None:
    """Run torchrun's agent; what it starts as `python -u SCRIPT ...` is forked by the server, too."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda _, args, environment: Fork(_address, list(args[2:]), environment, (1, 2))
    torchrun.main(["--standalone", f"--nproc_per_node={ranks}", *command])
