"""nanoGPT's train.py, timed from outside: a copy in a folder of its own, over random tokens."""

import itertools
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import attrs
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from errors import BadInput  # after the path to it
from model.config import ModelConfig

# On a CPU nanoGPT computes in fp32 whatever --dtype says: this is why. Taken out of the copy, both do what is asked.
CPU_CONDITION = "nullcontext() if device_type == 'cpu' else "
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
STEP = re.compile(r"^iter \d+: loss ")


@attrs.frozen(kw_only=True)
class Setting:
    """What it trains, and how."""

    model: ModelConfig
    microbatch_size: int
    accumulation: int
    precision: str  # "fp32" or "bf16"
    compiled: bool
    threads: int  # on a CPU
    device: str  # "cuda" or "cpu"


def prepare(clone: Path, folder: Path, model: ModelConfig) -> None:
    """Put nanoGPT and random tokens into a new folder. Raises BadInput where the clone is not nanoGPT's."""
    names = ("train.py", "model.py", "configurator.py")
    missing = [name for name in names if not (clone / name).is_file()]
    if missing:
        raise BadInput(f"--beside-nanogpt {clone}: no {missing[0]} there; clone github.com/karpathy/nanoGPT")
    script = (clone / "train.py").read_text()
    if script.count(CPU_CONDITION) != 1:
        raise BadInput(f"--beside-nanogpt {clone}: train.py differs from the one that is known; check out 3adf61e")
    folder.mkdir()
    (folder / "train.py").write_text(script.replace(CPU_CONDITION, ""))
    for name in names[1:]:
        (folder / name).symlink_to((clone / name).resolve())
    data = folder / "data" / "random"
    data.mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, 1 << 20, dtype=np.uint16)
    for split in ("train", "val"):
        tokens.tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": model.padded_vocab_size}))


def measure(folder: Path, setting: Setting, steps: int) -> tuple[list[float], list[float]]:
    """Return wall-clock and CPU seconds of each step; the latter are empty where the system does not tell."""
    model = setting.model
    values = {
        "dataset": "random",
        "device": setting.device,
        "dtype": DTYPES[setting.precision],
        "compile": setting.compiled,
        "batch_size": setting.microbatch_size,
        "gradient_accumulation_steps": setting.accumulation,
        "block_size": model.context_length,
        "n_layer": model.n_layers,
        "n_head": model.n_heads,
        "n_embd": model.emb_dim,
        "bias": model.qkv_bias,
        "max_iters": steps,
        "eval_iters": 1,
        "eval_interval": 10**9,
    }
    command = [sys.executable, "-u", "train.py", *(f"--{key}={value}" for key, value in values.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    output, wall, cpu = [], [], []
    for line in process.stdout:
        output.append(line)
        if STEP.match(line):
            wall.append(time.perf_counter())
            cpu.append(_cpu_seconds(process.pid))
    if process.wait():
        raise BadInput(f"nanoGPT's train.py failed:\n{''.join(output[-20:])}")
    return _between(wall), [] if None in cpu else _between([value for value in cpu if value is not None])


def _cpu_seconds(pid: int) -> float | None:
    """Return what a process has used of all cores so far, where the system tells."""
    file = Path(f"/proc/{pid}/stat")
    try:
        fields = file.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _between(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]
