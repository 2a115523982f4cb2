"""Start scripts, alone or under torchrun, within 0.1 s each, by forking a process that has already imported torch.

Everything after the imports is real: the script runs as `__main__`; torchrun's agent starts, watches and ends the
ranks; each rank is a process in a separate session, and the ranks communicate over gloo; signals and kills reach these
processes like any others. Forks do not cover imports in a fresh interpreter, a different hash seed for each rank, or
torchrun's command line. These are covered by the tests that start commands in the same way as a user.
"""

import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
IMPORTED_ONCE = """
torch._dynamo torch.distributed.run torch.distributed.fsdp matplotlib.figure matplotlib.backends.backend_agg
training.job training.optimizers.adamw training.planning.dry_run training.supervision.stack_location
evaluation.export.export evaluation.generation.sample evaluation.generation.smoke evaluation.judging.client
evaluation.loss.held_out_loss evaluation.serve.serve experiments.command experiments.sweep.variant_runs
reporting.report_page tokens.prepare.prepare jinja2.environment obstore.store openai.resources rich.console
sacrebleu.metrics.chrf xxhash
"""
TIMEOUT_SECONDS = 180
RANK_OF_TWO = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
MESSAGE_BYTES = 1 << 20
# Unless this environment variable is set, runs only pretend to draw charts. Drawing doubles the work of a run.
DRAW_CHART = "DRAW_CHART"

_address = ""  # address of the server's socket, in the server and in all its forks


def run(
    script: Path, *arguments: str, ranks: int = 1, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a Python script in the repository's root to its end. `options` are passed to `start`."""
    return finish(start(script, *arguments, ranks=ranks, environment=environment, **options))


def finish(process: Any, seconds: float = TIMEOUT_SECONDS) -> subprocess.CompletedProcess[str]:
    """Wait for a process, which must be a session leader, and return its output. A hang fails the test."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):  # the process has ended, but another process still has its streams
            os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode is not None
    return subprocess.CompletedProcess([], process.returncode, output, errors)


def start(
    script: Path,
    *arguments: str,
    ranks: int = 1,
    environment: dict[str, str] | None = None,
    file_bytes: int | None = None,
) -> "Process":
    """Start a Python script in the repository's root. If there is more than one rank, use torchrun.

    `file_bytes` emulates a full disk: it is the largest size that any file may have.
    """
    return Process([str(script), *arguments], {**os.environ, **(environment or {})}, ranks, file_bytes)


def execute(*command: str | Path, cwd: Path = ROOT, seconds: float | None = None, **environment: str) -> Any:
    """Run a command to its end as a user does, with additional or changed environment variables."""
    words, variables = [*map(str, command)], os.environ | environment
    return subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=seconds)


def wait_until(reached: Callable[[], object], process: Any = None, seconds: float = 230) -> None:
    """Wait until a condition is true. The test fails after `seconds`, or if the process ends first."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Fork:
    """A process that the server forks. It behaves like a subprocess.Popen of `python COMMAND` in a separate session."""

    def __init__(self, address: str, request: dict[str, Any], streams: tuple[int, int]):
        # `request` has the keyword arguments of _become. `streams` has the file descriptors that become the process's
        # stdout and stderr.
        self._command = request["command"]
        # The fork gets this process's limit on the size of files, as a child of this process would.
        request = {"file_bytes": resource.getrlimit(resource.RLIMIT_FSIZE)[0]} | request
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(address)
        socket.send_fds(self._connection, [json.dumps(request).encode()], streams)
        self.pid = int(self._connection.recv(MESSAGE_BYTES))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, which is negative for a signal, or None while the process runs."""
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

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the process has ended, but its status has not arrived yet
                os.kill(self.pid, number)


class Process(Fork):
    """A process that a test has started, with its streams and its child processes."""

    def __init__(self, command: list[str], environment: dict[str, str], ranks: int, file_bytes: int | None):
        request = {"command": command, "environment": environment, "ranks": ranks}
        pipes = os.pipe(), os.pipe()
        super().__init__(
            _start_server(),
            request | ({} if file_bytes is None else {"file_bytes": file_bytes}),
            (pipes[0][1], pipes[1][1]),
        )
        for _, writer in pipes:
            os.close(writer)
        self.stdout, self.stderr = (os.fdopen(reader) for reader, _ in pipes)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return output and errors, once no process is left that could write more.

        Raises subprocess.TimeoutExpired.
        """
        texts: dict[int, str] = {}

        def read(number: int) -> None:
            with (self.stdout, self.stderr)[number] as stream:
                texts[number] = stream.read()

        readers = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(2)]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        if len(texts) < 2:
            raise subprocess.TimeoutExpired(self._command, timeout or 0)
        return texts[0], texts[1]

    def children(self) -> list[int]:
        """Return the pids of this process's running children, such as torchrun's ranks, in the order of their start."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(_start_server())
            connection.send(json.dumps({"children_of": self.pid}).encode())
            return json.loads(connection.recv(MESSAGE_BYTES))


@cache
def _start_server() -> str:
    """Return the server's address. The first of pytest's workers that calls this starts the server for all of them."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder = Path(tempfile.gettempdir(), f"launch-{os.environ.get('PYTEST_XDIST_TESTRUNUID', uuid.uuid4().hex)}")
    folder.mkdir(exist_ok=True)
    address = str(folder / "socket")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(address).exists():
            code = f"from tests import launch; launch.serve({address!r}, {owner})"
            server = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
            assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    return address


def serve(address: str, owner: int) -> NoReturn:
    """Fork a process for each request until the owner ends. Reply with the fork's pid, and later with its exit status.

    This process has only one thread, so no lock is held when it forks.
    """
    global _address  # noqa: PLW0603  # read by forks, and by their forks
    _address = address
    for name in IMPORTED_ONCE.split():
        importlib.import_module(name)
    _fill_caches()
    gc.collect()
    gc.freeze()  # otherwise, garbage collection in a fork would copy all existing objects
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    owner_end = os.pidfd_open(owner)
    selector.register(owner_end, selectors.EVENT_READ)
    parents: dict[int, int] = {}  # for each running process, the process that requested it
    bound: set[int] = set()  # processes that get SIGTERM when their parent ends
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj == owner_end:
                shutil.rmtree(Path(address).parent)
                os._exit(0)
            if key.fileobj is listener:
                _answer(listener, selector, parents, bound)
            else:
                pid, connection = key.data
                selector.unregister(key.fd)
                os.close(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                del parents[pid]
                bound.discard(pid)
                for child in bound:
                    if parents[child] == pid:
                        os.kill(child, signal.SIGTERM)
                with connection:
                    try:
                        connection.send(str(status).encode())
                    except ConnectionError:
                        continue  # the parent no longer waits for the status


def _fill_caches() -> None:
    """Fill the caches of matplotlib and cattrs, and cache the git commit, so that no run needs to do this."""
    from common.checks import structured
    from tokens.format.manifest import Manifest
    from training.hardware.environment import git_commit
    from training.telemetry import chart

    with tempfile.TemporaryDirectory() as folder:
        steps = [{"step": step, "train_loss": 1, "learning_rate": 1, "grad_norm": 1} for step in range(1, 9)]
        Path(folder, "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in steps))
        chart.draw_chart(Path(folder))
    git_commit()
    with suppress(ValueError):
        structured({}, Manifest, unknown_keys=True)


def _answer(
    listener: socket.socket, selector: selectors.BaseSelector, parents: dict[int, int], bound: set[int]
) -> None:
    connection, _ = listener.accept()
    try:
        text, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
    except ConnectionError:
        text, streams = b"", []
    if not text:  # the process was killed before it could send a request
        connection.close()
        return
    request = json.loads(text)
    if "children_of" in request:
        with connection, suppress(ConnectionError):
            children = [pid for pid, parent_pid in parents.items() if parent_pid == request["children_of"]]
            connection.send(json.dumps(children).encode())
        return
    stops_with_parent = request.pop("stops_with_parent", False)
    parent = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    in_session, entering = os.pipe()
    pid = os.fork()
    if pid == 0:
        for key in list(selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
                key.data[1].close()
        selector.close()
        listener.close()
        connection.close()
        null = os.open(os.devnull, os.O_RDWR)
        for number, stream in enumerate([null, *streams]):
            os.dup2(stream, number)
            os.close(stream)
        os.setsid()
        os.close(in_session)
        os.close(entering)
        _become(**request)
    for stream in [entering, *streams]:
        os.close(stream)
    # Wait until the fork has called setsid and closed the pipe. Before that, a killpg would reach no process, and its
    # caller would wait forever.
    os.read(in_session, 1)
    os.close(in_session)
    parents[pid] = parent
    if stops_with_parent:
        bound.add(pid)
        if parent not in parents:  # the parent has ended already
            os.kill(pid, signal.SIGTERM)
    with suppress(ConnectionError):  # the parent was killed in the meantime
        connection.send(str(pid).encode())
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))


def _become(command: list[str], environment: dict[str, str], file_bytes: int, ranks: int = 1) -> NoReturn:
    """Run a script, or torchrun with the script, as a newly started Python would, and then end this process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    sys.path[:0] = [str(Path(command[0]).parent), str(ROOT)]
    from training.planning import batch_probe
    from training.supervision import training_process
    from training.telemetry import chart

    batch_probe.subprocess = SimpleNamespace(Popen=lambda args, env, **_: _fork_again(args[1:], dict(env)))
    finished_drawing = SimpleNamespace(poll=lambda: 0, wait=lambda _: 0)
    chart.subprocess = SimpleNamespace(
        Popen=lambda args, env, **_: _fork_again(args[1:], env) if DRAW_CHART in env else finished_drawing,
        TimeoutExpired=subprocess.TimeoutExpired,
        DEVNULL=None,
    )
    training_process.subprocess = SimpleNamespace(
        DEVNULL=None,
        STDOUT=None,
        Popen=lambda args, env, stdout, **_: _fork_again(
            args[1:], dict(env), (stdout.fileno(), stdout.fileno()), stops_with_parent=True
        ),
    )
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
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:  # noqa: BLE001  # the interpreter also prints the traceback of any exception
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def _fork_again(
    command: list[str],
    environment: dict[str, str],
    streams: tuple[int, int] = (1, 2),
    *,
    stops_with_parent: bool = False,
) -> Fork:
    """Let the server fork another process, with the streams of this process or with other streams.

    With `stops_with_parent`, the new process gets SIGTERM when this process ends. The server sends the signal, because
    the new process is a child of the server.
    """
    request = {"command": command, "environment": environment, "stops_with_parent": stops_with_parent}
    return Fork(_address, request, streams)


def _torchrun(command: list[str], ranks: int) -> None:
    """Run torchrun's agent. Where the agent would start `python -u SCRIPT ...`, the server forks a process instead."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # For records that are never read, torchrun looks up the source of all callers. This takes longer than all the rest.
    dynamic_rendezvous.get_method_name = lambda _=0: ""
    SubprocessHandler._popen = lambda _, args, environment: _fork_again(list(args[2:]), environment)
    kill_group = os.killpg

    def kill_existing_group(group: int, number: int) -> None:
        # A process that has ended no longer exists, because the server has waited for it. A Popen would leave a zombie.
        with suppress(ProcessLookupError):
            kill_group(group, number)

    os.killpg = kill_existing_group
    torchrun.main(["--standalone", f"--nproc_per_node={ranks}", *command])
