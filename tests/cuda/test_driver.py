"""The emulated driver is honest: if it cannot emulate a call, it aborts and says why. It records torch's real calls."""

import json
import signal
import sys
from typing import Any

import pytest
import torch

from tests import launch
from tests.fakegpu.recorder import Kind, record

M, N, K, BATCH = 8, 24, 40, 3
MATMUL_FLOPS = 2 * M * N * K
MEMORY = 1000 << 20  # a multiple of 20 MiB, the unit of expandable segments

pytestmark = pytest.mark.oldest_torch  # the driver is built separately for each version of torch


def execute(program: str, **variables: str) -> Any:
    """Run a Python program on emulated GPUs."""
    return launch.execute(sys.executable, "-c", program, **variables)


def test_host_reads_of_device_memory_name_the_allocation() -> None:
    done = execute(
        "import ctypes, torch\n"
        "tensor = torch.ones(1 << 24, device='cuda')\n"
        "ctypes.string_at(tensor.data_ptr() + 5000, 1)",
        PYTORCH_ALLOC_CONF="expandable_segments:False",
    )
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.startswith("fakegpu: host access to device memory at 0x")
    assert done.stderr.endswith(", byte 5000 of 67108864 allocated by cudaMalloc\n")


def test_other_crashes_are_not_mistaken_for_host_reads() -> None:
    done = execute("import ctypes, torch\ntorch.ones(8, device='cuda')\nctypes.string_at(64, 1)")
    assert done.returncode == -signal.SIGSEGV
    assert "fakegpu" not in done.stderr


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("import torch; torch.fft.fft(torch.ones(8, device='cuda'))", "cufftCreate"),  # a library of torch imports it
        ("import ctypes; ctypes.CDLL('libcuda.so.1').cuArrayDestroy(None)", "cuArrayDestroy"),  # looked up by name
    ],
)
def test_a_missing_function_ends_the_process_with_its_name(program: str, name: str) -> None:
    done = execute(program)
    assert done.returncode == -signal.SIGABRT
    assert f"fakegpu: {name} was called and is not emulated" in done.stderr


def test_lookups_of_unknown_functions_are_named() -> None:
    done = execute(
        "import ctypes\n"
        "found = ctypes.c_void_p(1)\n"
        "status = ctypes.CDLL('libcuda.so.1').cuGetProcAddress_v2(b'cuNovelty', ctypes.byref(found), 13000, 0, None)\n"
        "print(status, found.value)"
    )
    assert done.stdout == "500 None\n"
    assert "fakegpu: cuNovelty was looked up and is unknown" in done.stderr


@pytest.mark.parametrize("expandable", [False, True])
def test_refused_allocations_are_recorded(expandable: bool) -> None:
    done = execute(
        "import torch\n"
        "from tests.fakegpu.recorder import Kind, record\n"
        "with record() as recording:\n"
        f"    whole = torch.empty({MEMORY}, dtype=torch.uint8, device='cuda')\n"
        "    try:\n"
        "        torch.empty(1, device='cuda')\n"
        "    except torch.OutOfMemoryError:\n"
        "        print('out of memory')\n"
        "print(sum(event.bytes for event in recording.of(Kind.ALLOCATE)))\n"
        "print({event.bytes for event in recording.of(Kind.REFUSED)})",
        FAKEGPU_GIB=str(MEMORY / 2**30),
        PYTORCH_CUDA_ALLOC_CONF=f"expandable_segments:{expandable}",
    )
    assert done.stdout.splitlines() == ["out of memory", str(MEMORY), str({2 << 20})], done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrix_products_are_recorded_with_their_costs(dtype: torch.dtype) -> None:
    left, right = torch.ones(M, K, device="cuda", dtype=dtype), torch.ones(K, N, device="cuda", dtype=dtype)
    bias, out_of = torch.ones(N, device="cuda", dtype=dtype), torch.ones(N, K, device="cuda", dtype=dtype)
    stacks = (torch.ones(BATCH, *shape, device="cuda", dtype=dtype) for shape in ((M, K), (K, N)))
    with record() as recording:
        left @ right
        torch.nn.functional.linear(left, out_of, bias)
        torch.bmm(*stacks)
    products = recording.of(Kind.GEMM)
    assert [product.flops for product in products] == [MATMUL_FLOPS, MATMUL_FLOPS, BATCH * MATMUL_FLOPS]
    moved = (M * K + K * N + M * N) * dtype.itemsize
    assert [product.bytes for product in products] == [moved, moved, BATCH * moved]
    assert recording.flops == (2 + BATCH) * MATMUL_FLOPS


def test_collectives_are_recorded_with_their_bytes_and_ranks() -> None:
    done = execute(
        "import json, os, torch, torch.distributed as dist\n"
        "from tests.fakegpu.recorder import record\n"
        "dist.init_process_group('nccl', store=dist.HashStore(), rank=0, world_size=8)\n"
        "part, whole = torch.ones(1000, device='cuda'), torch.ones(8000, device='cuda')\n"
        "with record() as recording:\n"
        "    dist.all_reduce(part)\n"
        "    dist.all_gather_into_tensor(whole, part)\n"
        "    dist.reduce_scatter_tensor(part, whole)\n"
        "    dist.broadcast(part.bfloat16(), 0)\n"
        "found = {name: [traffic.calls, traffic.bytes] for name, traffic in recording.collectives.items()}\n"
        "print(json.dumps(found), {event.ranks for event in recording.events if event.ranks}, flush=True)\n"
        "os._exit(0)"
    )
    traffic, _, ranks = done.stdout.rpartition(" ")
    expected_bytes = {"AllReduce": 4000, "AllGather": 32000, "ReduceScatter": 32000, "Broadcast": 2000}
    assert json.loads(traffic) == {name: [1, size] for name, size in expected_bytes.items()}, done.stderr
    assert ranks == "{8}\n"


def test_only_host_waits_are_recorded_as_waits() -> None:
    tensor, pinned = torch.ones(8, device="cuda"), torch.ones(8).pin_memory()
    with record() as recording:
        tensor.add_(1)
        tensor.copy_(pinned, non_blocking=True)
        pinned.copy_(tensor, non_blocking=True)
    assert recording.synchronizations == {}
    with record() as recording:
        tensor[0].item()
    assert recording.synchronizations.total() == 1
    with record() as recording:
        torch.ones(8).copy_(tensor, non_blocking=True)
    assert recording.synchronizations == {"cudaMemcpyAsync to pageable memory": 1}


def test_kernels_are_recorded_on_their_streams_by_name() -> None:
    tensor, stream = torch.ones(8, device="cuda"), torch.cuda.Stream()
    with record() as recording:
        tensor.add_(1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            tensor.mul_(2)
    first, second = recording.of(Kind.KERNEL)
    assert "elementwise" in first.name
    assert (first.stream, second.stream) == (0, stream.cuda_stream)
    (signal_,), (wait,) = recording.of(Kind.SIGNAL), recording.of(Kind.WAIT)
    assert (signal_.object, signal_.stream, wait.stream) == (wait.object, 0, stream.cuda_stream)


@pytest.mark.parametrize(("ordered", "status"), [(False, 1), (True, 0)])
def test_the_sanitizer_finds_races_between_streams(ordered: bool, status: int) -> None:
    done = execute(
        "import torch\n"
        "tensor, stream = torch.ones(8, device='cuda'), torch.cuda.Stream()\n"
        f"{'stream.wait_stream(torch.cuda.current_stream())' if ordered else ''}\n"
        "with torch.cuda.stream(stream):\n"
        "    tensor.mul_(2)",
        TORCH_CUDA_SANITIZER="1",
    )
    assert done.returncode == status, done.stderr
    assert ("data race" in done.stderr) is not ordered


def test_old_drivers_and_unusable_gpus_are_emulated() -> None:
    program = (
        "import ctypes\n"
        "seen, usable = ctypes.c_int(), ctypes.c_int()\n"
        "ctypes.CDLL('libnvidia-ml.so.1').nvmlDeviceGetCount_v2(ctypes.byref(seen))\n"
        "status = ctypes.CDLL('libcuda.so.1').cudaGetDeviceCount(ctypes.byref(usable))\n"
        "print(status, seen.value, usable.value)"
    )
    assert execute(program, FAKEGPU_COUNT="8").stdout == "0 8 8\n"
    assert execute(program, FAKEGPU_COUNT="8", FAKEGPU_USABLE="7").stdout == "0 8 7\n"
    assert execute(program, FAKEGPU_COUNT="8", FAKEGPU_USABLE="0").stdout == "100 8 0\n"
    assert execute(program, FAKEGPU_COUNT="8", FAKEGPU_OLD_DRIVER="1").stdout == "35 8 0\n"
    assert execute(program, FAKEGPU_COUNT="8", CUDA_VISIBLE_DEVICES="1,3").stdout == "0 8 2\n"


def test_an_invalid_option_is_one_line() -> None:
    done = execute("import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)", FAKEGPU="h1000")
    assert done.returncode == 2
    assert done.stderr == "fakegpu: FAKEGPU: got 'h1000', expected h100, a100-80gb, a100-40gb, t4 or a100-mig\n"
