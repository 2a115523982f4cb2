"""Script: steps of GPT-2 124M under torch's CUDA sanitizer: WRAPPER DETERMINISM. Prints the number of streams in use.

Not compiled: the sanitizer sees what passes torch's dispatcher, and Triton's kernels do not.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import emulated_steps
from torch.cuda import _sanitizer

streams = set()
update = _sanitizer.EventHandler._handle_kernel_launch


def seen(handler: Any, stream: int, *arguments: Any, **named: Any) -> Any:
    """Note the stream of an operation."""
    streams.add(stream)
    return update(handler, stream, *arguments, **named)


_sanitizer.EventHandler._handle_kernel_launch = seen
_sanitizer.enable_cuda_sanitizer()
layout = emulated_steps.EmulatedLayout(
    size="124M",
    microbatch=1,
    accumulation=2,
    world_size=8,
    settings=(f"parallel={sys.argv[1]}", f"determinism={sys.argv[2]}", "compile=false"),
)
emulated_steps.measure(layout, 1)
print("streams", len(streams), flush=True)
os._exit(0)
