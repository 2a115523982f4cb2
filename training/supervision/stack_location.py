"""Stack location: the line of this repository that the process executes, and the collective that it waits in."""

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


def current_place() -> str:
    """Return where training is. Call it from another thread than the main one, at any time."""
    try:
        frames = sys._current_frames()
        main = frames.pop(threading.main_thread().ident or 0)
        joined = _joined(main)
        if joined is not None:  # a save in flight, which may wait for another rank
            main = frames.get(joined.ident or 0, main)
        for thread in threading.enumerate():
            if not thread.name.startswith("Dummy"):  # Python's stand-in for a thread that it has not started
                frames.pop(thread.ident or 0, None)
        # On a GPU, hooks of the backward pass run in autograd's own threads: the frames that are left.
        places = [_innermost(traceback.walk_stack(frame)) for frame in (main, *frames.values())]
        return next((found for found in places if found[0] is not None), places[0])[1]
    except Exception as error:  # noqa: BLE001  # frames of running threads may change or vanish; heartbeats must go on
        return f"an unknown line ({type(error).__name__})"


def place_of_error(trace: TracebackType | None) -> str:
    """Return where an exception was raised, from its traceback."""
    return _innermost(reversed([*traceback.walk_tb(trace)]))[1]


def _joined(frame: FrameType) -> threading.Thread | None:
    for inner, _ in itertools.islice(traceback.walk_stack(frame), 2):  # Python < 3.13 waits in a function of join's
        if inner.f_code is threading.Thread.join.__code__:
            thread: threading.Thread = inner.f_locals["self"]
            return thread
    return None


def _innermost(walk: Iterable[tuple[FrameType, int]]) -> tuple[str | None, str]:
    """Return the function of torch.distributed, and in words the line here that called it; `walk`: innermost first."""
    call, place = None, "code outside this repository"
    for frame, line in walk:
        path, function = Path(frame.f_code.co_filename), frame.f_code.co_name
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            place = f"{path.relative_to(ROOT)}:{line}, {function}"
            break
        if call is None and path.is_relative_to(TORCH_DISTRIBUTED):
            call = function
        elif call is None and function == "_engine_run_backward":  # in C++, DDP waits there for its all-reduce
            call = "backward"
    return call, place if call is None else f"{call} ({place})"
