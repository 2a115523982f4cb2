"""Determinism levels and their switches, and the numerics fingerprint, which each checkpoint records.

off       the fastest kernels and reductions; runs are equal up to rounding
run       bit-identical with the same data-parallel size, wrapper and number of tensor shards
elastic   bit-identical on any world size, under DDP or FSDP and after a restart, with the same number of tensor shards

The fingerprint contains the versions, the hardware and the settings on which a run's bits depend.
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

# Environment variables that change which kernels run, or the order of the kernels' additions
_ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
# The largest values that glibc accepts for these two parameters. The second one depends on the version of glibc.
KEPT_BYTES, MAPPED_BYTES = (1 << 31) - 1, (1 << 30, 1 << 25)


def resolve_numerics(train: TrainConfig, device: torch.device) -> Numerics:
    execution = train.execution
    return Numerics(
        determinism=_determinism(execution, device.type),
        precision=resolve(execution.precision, device),
        compiled=_compiled(execution, device.type),
    )


def compiled_on_gpu(train: TrainConfig) -> dict[str, str]:
    """Return what a run on a GPU compiles when it starts. Compiling needs a C compiler.

    The keys name what is compiled. Each value is the setting that avoids this compilation. This function calls the same
    functions that choose the code of the run, so that its answer is always right. It does not use the GPU.
    """
    execution, work = train.execution, {}
    determinism, sharded = _determinism(execution, "cuda"), execution.shards > 1
    if _compiled(execution, "cuda"):
        work["torch.compile"] = setting(compile=False)
    if needs_exact_norm(determinism, sharded=False):
        work[f"the gradient norm with determinism {determinism}"] = setting(determinism="off")
    if needs_exact_norm("off", sharded=sharded):
        work["the gradient norm with tensor shards"] = setting(tensor_parallel=1, tensor_shards=1)
    return work


def _determinism(options: ExecutionOptions, device: str) -> str:
    return options.determinism or ("off" if device == "cuda" else "elastic")


def _compiled(options: ExecutionOptions, device: str) -> bool | str:
    return device == "cuda" if options.compile is None else options.compile


def fingerprint(train: TrainConfig, numerics: Numerics, ranks: Ranks) -> dict[str, Any]:
    """Return the numerics fingerprint of this rank."""
    cuda = ranks.device.type == "cuda"
    # Our names of attention kernels -> torch's names of their switches
    switches = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}
    kernels = [name for name, switch in switches.items() if getattr(torch.backends.cuda, f"{switch}_sdp_enabled")()]
    values: dict[str, Any] = {
        **attrs.asdict(numerics),
        "compiled": "blocks, head and loss" if numerics.compiled is True else numerics.compiled,
        "microbatch_size": train.batch.microbatch_size,
        "loss_chunks": train.memory.loss_chunks,  # this and the next key change the order of additions
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
    # With "elastic", the bits do not depend on the two values below. At every level, the bits are the same for any
    # number of ranks that share a layer.
    if numerics.determinism == "run":
        values |= {"data_parallel_size": ranks.data_parallel.size, "parallel": train.execution.parallel}
    return values | {name: os.environ.get(name) for name in _ENVIRONMENT}


def agreed_fingerprint(train: TrainConfig, numerics: Numerics, ranks: Ranks) -> dict[str, Any]:
    """Return rank 0's fingerprint on every rank. Raises BadInput if ranks differ, unless determinism is off."""
    fingerprints = gather(ranks, fingerprint(train, numerics, ranks))
    for rank, rank_fingerprint in enumerate(fingerprints):
        changes = drift(fingerprints[0], rank_fingerprint)
        if changes and numerics.determinism != "off":
            raise BadInput(
                f"determinism {numerics.determinism}: the numerics of rank {rank} differ from those of rank 0 "
                f"({'; '.join(changes)}); use identical machines, or set determinism to off"
            )
    return fingerprints[0]


def drift(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return "field: old -> new" for each difference between two fingerprints.

    Fingerprints of earlier versions of Lockstep may have different field names, or fewer fields.
    """
    before = {name.replace("world_size", "data_parallel_size"): value for name, value in before.items()}
    before, now = ({"loss_chunks": 1, "tensor_shards": 1} | values for values in (before, now))
    fields = sorted(before.keys() | now.keys())
    return [f"{name}: {before.get(name)} -> {now.get(name)}" for name in fields if before.get(name) != now.get(name)]


def set_determinism(level: str, cpu_threads: int, ranks: Ranks) -> None:
    """Set the process-wide switches of a determinism level. Call it before the first kernel runs."""
    if ranks.device.type == "cpu":
        torch.set_num_threads(cpu_threads)
        _keep_freed_memory()
    if level != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this variable when it starts
        torch.use_deterministic_algorithms(True)
        # Otherwise torch would fill every new buffer with NaN.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        # cuDNN's attention has no deterministic backward pass. torch skips that kernel in this mode anyway, but the
        # fingerprint reads this switch.
        torch.backends.cuda.enable_cudnn_sdp(False)


def _keep_freed_memory() -> None:
    """If the C library is glibc, make it keep freed memory for the next step (see "New pages" in docs/NOTES.md)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for threshold in MAPPED_BYTES:  # blocks that are smaller than this come from the heap
            if mallopt(M_MMAP_THRESHOLD, threshold):
                # The free memory at the end of the heap is returned to the system only if it is larger than this.
                mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
                break
