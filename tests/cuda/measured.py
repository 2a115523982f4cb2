"""Steps of GPT-2 on emulated GPUs. Each layout is measured only once, in a separate process.

All of pytest's workers use the same measurement.
"""

import fcntl
import hashlib
import json
import os
from itertools import product
from pathlib import Path

import attrs
import pytest
from emulated_steps import EmulatedSteps

from tests.conftest import ROOT
from tests.cuda.emulated import CACHES, run

# Measured steps before the recorded step, in addition to the warm-up. In its first ten steps, DDP measures itself and
# waits.
STEPS = 10


@attrs.frozen(kw_only=True)
class Layout:
    """The training of a network on rank 0 of a job.

    As text, it has these parts: size, micro-batch x accumulation x world size, wrapper, determinism, settings and GPU.
    """

    size: str
    microbatch: int
    accumulation: int = 2
    world_size: int = 1
    parallel: str = "ddp"
    determinism: str = "off"
    settings: tuple[str, ...] = ()  # KEY=VALUE of train.json, model.KEY=VALUE
    gpu: str = "h100"

    def __str__(self) -> str:
        shape = f"{self.microbatch}x{self.accumulation}x{self.world_size}"
        return "-".join([self.size, shape, self.parallel, self.determinism, *self.settings, self.gpu])


SIZES = {"124M": 16, "1.5B": 4}  # micro-batch by size
EIGHT_RANKS = [
    Layout(size=size, microbatch=SIZES[size], world_size=8, parallel=parallel, determinism=determinism)
    for size, parallel, determinism in product(SIZES, ("ddp", "fsdp"), ("off", "elastic"))
]


def case(layout: Layout, *parameters: object, oldest: bool = False) -> object:
    """Return a test case with a layout and other parameters. With `oldest`, it also runs on the oldest torch."""
    return pytest.param(layout, *parameters, id=str(layout), marks=[pytest.mark.oldest_torch] * oldest)


def measure(layout: Layout, steps: int = STEPS) -> EmulatedSteps:
    """Return the measurement of a layout. The first worker that needs it runs the measurement, and the rest wait."""
    name = hashlib.sha256(f"{layout}-{steps}".encode()).hexdigest()  # the settings can be too long for a file name
    file_path = Path(os.environ[CACHES]) / f"{name}.json"
    file_path.parent.mkdir(exist_ok=True)
    with file_path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (text := file.read()):
            text = _measure(layout, steps)
            file.write(text)
    return EmulatedSteps(**json.loads(text))


def _measure(layout: Layout, steps: int) -> str:
    """Measure the steps of a layout, and return the measurement as JSON."""
    words = ["--as-json", f"--sizes={layout.size}", f"--steps={steps}"]
    for name in ("microbatch", "accumulation", "world_size", "parallel", "determinism"):
        words.append(f"--{name.replace('_', '-')}={getattr(layout, name)}")
    words += ["--set", *layout.settings] if layout.settings else []
    script = ROOT / "benchmarks" / "emulated_steps.py"
    done = run(script, *words, gpu=layout.gpu, determinism=layout.determinism)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
