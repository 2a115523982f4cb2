"""Start scripts, alone or under torchrun, as forks of a process that has imported torch: in a tenth of a second each.

Everything after the imports is real: the script runs as `__main__`, torchrun's own agent starts, watches and ends the
ranks, each rank is a process in a session of its own, with gloo between them. What a fork cannot show, such as imports
on a fresh interpreter or another hash seed per rank, is left to the tests that start commands as a user does.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
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

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(IMPORTED_ONCE)


def run(
    script: Path, *arguments: str, ranks: int = 1, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python script from the repository's root to its end; under torchrun for more than one rank."""
    command = [str(script), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        process = server.Process(target=_launch, args=(command, ranks, environment or {}, output, errors))
        process.start()
        process.join(TIMEOUT_SECONDS)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(command, TIMEOUT_SECONDS, output.read_text(), errors.read_text())
        assert process.exitcode is not None
        return subprocess.CompletedProcess(command, process.exitcode, output.read_text(), errors.read_text())


def _launch(command: list[str], ranks: int, environment: dict[str, str], output: Path, errors: Path) -> None:
    """Become the command, in the process that the server has forked for it."""
    for stream, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(ROOT)
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from training import chart

    chart.subprocess = SimpleNamespace(Popen=_Fork)
    if ranks == 1:
        _become(command, {**os.environ, **environment})
    os.environ.update(environment)
    SubprocessHandler._popen = lambda _, args, env: _Fork(args, env=env)
    torchrun.main(["--standalone", f"--nproc_per_node={ranks}", *command])


class _Fork(subprocess.Popen[bytes]):
    """A Python process like any other, but forked: of `python -u SCRIPT ...` or `python -m MODULE ...`."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        environment = others[5]
        self.pid = os.fork()
        if self.pid == 0:
            _let_go()
            os.setsid()  # what is started here asks for it
            _become(list(args[1:]), environment or dict(os.environ))
        self._child_created = True


def _let_go() -> None:
    """Let go of the parent's sockets and locks. Their numbers stay taken: objects that came along still know them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for path in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(path.name)
        if descriptor not in {0, 1, 2, nothing} and path.exists():  # the listing's own is gone
            os.dup2(nothing, descriptor)


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Run the script as Python would from its start, and end this process."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # torchrun's agent had its own
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    status: Any = 0
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command[command[0] == "-u" :]
            sys.path[:0] = [str(Path(sys.argv[0]).parent), str(ROOT)]
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001  # as the interpreter would
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
