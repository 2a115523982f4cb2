"""Stack location: the line of this repository that a process executes, and the collective in which it waits."""

import itertools
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
TORCH_DISTRIBUTED = Path(dist.__file__).parent


def current_line() -> str:
    """Return the line of code that training is executing. Call it at any time, from any thread except the main one."""
    try:
        frames = sys._current_frames()
        main = frames.pop(threading.main_thread().ident or 0)
        joined_thread = _joined_thread(main)
        if joined_thread is not None:  # the thread of a save, which may itself wait for another rank
            main = frames.get(joined_thread.ident or 0, main)
        for thread in threading.enumerate():
            if not thread.name.startswith("Dummy"):  # Python gives this name to threads that it did not start
                frames.pop(thread.ident or 0, None)
        # On a GPU, hooks of the backward pass run in threads of autograd. The remaining frames belong to these threads.
        calls_and_lines = [_innermost(traceback.walk_stack(frame)) for frame in (main, *frames.values())]
        return next((line for call, line in calls_and_lines if call is not None), calls_and_lines[0][1])
    except Exception as error:  # noqa: BLE001  # frames may change while they are read; heartbeats must continue
        return f"an unknown line ({type(error).__name__})"


def line_of_error(trace: TracebackType | None) -> str:
    """Return the line of code that raised an exception, from its traceback."""
    return _innermost(reversed([*traceback.walk_tb(trace)]))[1]


def _joined_thread(frame: FrameType) -> threading.Thread | None:
    """Return the thread that a frame is joining, or None if it is not joining any."""
    # Before Python 3.13, the innermost frame belongs to a function that `join` calls.
    for inner, _ in itertools.islice(traceback.walk_stack(frame), 2):
        if inner.f_code is threading.Thread.join.__code__:
            thread: threading.Thread = inner.f_locals["self"]
            return thread
    return None


def _innermost(walk: Iterable[tuple[FrameType, int]]) -> tuple[str | None, str]:
    """Return the torch.distributed function that is running, or None, and a text that names our innermost line.

    `walk` begins with the innermost frame.
    """
    call, code_line = None, "code outside this repository"
    for frame, line in walk:
        path, function = Path(frame.f_code.co_filename), frame.f_code.co_name
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            code_line = f"{path.relative_to(ROOT)}:{line}, {function}"
            break
        if call is None and path.is_relative_to(TORCH_DISTRIBUTED):
            call = function
        elif call is None and function == "_engine_run_backward":  # DDP waits here, in C++, for its all-reduce
            call = "backward"
    return call, code_line if call is None else f"{call} ({code_line})"
