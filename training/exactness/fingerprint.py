"""Determinism levels with their switches, and the numerics fingerprint, which each checkpoint records.

off       fastest kernels and reductions, reproducible to rounding
run       bit-identical on the same data-parallel size and wrapper, in as many tensor shards
elastic   bit-identical on any world size, under DDP or FSDP, in as many tensor shards, resumed or not

The fingerprint has versions, hardware and settings that a run's bits depend on.
"""

import ctypes
import os
import sys
from typing import Any

import attrs
import torch

from common.errors import BadInput
from common.launch import setting
from training.config.key_groups import ExecutionOptions
from training.config.train_config import TrainConfig
from training.exactness.row_sums import needs_exact_norm
from training.hardware.environment import cpu_name
from training.parallel.process_group import Ranks, gather
from training.precision import Numerics, resolve

# Settings that change which kernels run or how they add.
_ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
KEPT_BYTES, MAPPED_BYTES = (1 << 31) - 1, (1 << 30, 1 << 25)  # the most that versions of glibc take


def resolve_numerics(train: TrainConfig, device: torch.device) -> Numerics:
    wanted = train.execution
    return Numerics(
        determinism=_determinism(wanted, device.type),
        precision=resolve(wanted.precision, device),
        compiled=_compiled(wanted, device.type),
    )


def compiled_on_gpu(train: TrainConfig) -> dict[str, str]:
    """Return what a run compiles at its start on a GPU, which needs a C compiler, each with the setting to do without.

    It asks the functions that choose the code of the run, so that it knows no less than they do. Touches no GPU.
    """
    execution, work = train.execution, {}
    determinism, sharded = _determinism(execution, "cuda"), execution.shards > 1
    if _compiled(execution, "cuda"):
        work["torch.compile"] = setting(compile=False)
    if needs_exact_norm(determinism, sharded=False):
        work[f"the gradient norm of determinism {determinism}"] = setting(determinism="off")
    if needs_exact_norm("off", sharded=sharded):
        work["the gradient norm of tensor shards"] = setting(tensor_parallel=1, tensor_shards=1)
    return work


def _determinism(wanted: ExecutionOptions, device: str) -> str:
    return wanted.determinism or ("off" if device == "cuda" else "elastic")


def _compiled(wanted: ExecutionOptions, device: str) -> bool | str:
    return device == "cuda" if wanted.compile is None else wanted.compile


def fingerprint(train: TrainConfig, numerics: Numerics, ranks: Ranks) -> dict[str, Any]:
    cuda = ranks.device.type == "cuda"
    switches = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}  # of attention
    kernels = [name for name, own in switches.items() if getattr(torch.backends.cuda, f"{own}_sdp_enabled")()]
    values: dict[str, Any] = {
        **attrs.asdict(numerics),
        "compiled": "blocks, head and loss" if numerics.compiled is True else numerics.compiled,
        "microbatch_size": train.batch.microbatch_size,
        "loss_chunks": train.memory.loss_chunks,  # this and the next: other orders of additions
        "tensor_shards": train.execution.shards,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "device": torch.cuda.get_device_name(ranks.device) if cuda else cpu_name(),
        "attention": "+".join(kernels) if cuda else "cpu",
        "cpu_capability": None if cuda else torch.backends.cpu.get_cpu_capability(),
        "cpu_threads": None if cuda else torch.get_num_threads(),
    }
    if numerics.determinism == "run":  # elastic is independent of these two; ranks that share layers change nothing
        values |= {"data_parallel_size": ranks.data_parallel.size, "parallel": train.execution.parallel}
    return values | {name: os.environ.get(name) for name in _ENVIRONMENT}


def agreed_fingerprint(train: TrainConfig, numerics: Numerics, ranks: Ranks) -> dict[str, Any]:
    """Return rank 0's fingerprint on every rank. Raises BadInput where ranks differ, unless determinism is off."""
    everywhere = gather(ranks, fingerprint(train, numerics, ranks))
    for rank, other in enumerate(everywhere):
        changes = drift(everywhere[0], other)
        if changes and numerics.determinism != "off":
            raise BadInput(
                f"determinism {numerics.determinism}: rank {rank} computes with other numerics than rank 0 "
                f"({'; '.join(changes)}); use equal machines, or set determinism to off"
            )
    return everywhere[0]


def drift(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return "field: old -> new" for each difference between two fingerprints; older ones lack names of today."""
    before = {name.replace("world_size", "data_parallel_size"): value for name, value in before.items()}
    before, now = ({"loss_chunks": 1, "tensor_shards": 1} | values for values in (before, now))
    fields = sorted(before.keys() | now.keys())
    return [f"{name}: {before.get(name)} -> {now.get(name)}" for name in fields if before.get(name) != now.get(name)]


def set_determinism(level: str, cpu_threads: int, ranks: Ranks) -> None:
    """Set the process-wide switches of a level. Call it before the first kernel runs."""
    if ranks.device.type == "cpu":
        torch.set_num_threads(cpu_threads)
        _keep_freed_memory()
    if level != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # NaN in every buffer
        torch.backends.cudnn.benchmark = False
        # It has no deterministic backward: strict mode skips it anyway, and the fingerprint is to say so.
        torch.backends.cuda.enable_cudnn_sdp(False)


def _keep_freed_memory() -> None:
    """Make glibc, where it is glibc, keep freed memory for the next step (docs/NOTES.md, new pages)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for threshold in MAPPED_BYTES:  # smaller blocks come from the heap,
            if mallopt(M_MMAP_THRESHOLD, threshold):
                mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)  # whose free end returns to the system only beyond this
                break
