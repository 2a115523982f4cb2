"""Steps of the first GPU hour, in order of worth: command, time limit, and the cells of docs/ that each fills."""

import attrs

SMALL_SPEED = "benchmarks/train_speed.py --sizes small --steps 2 --set compile=false"
SMALL_STEPS = "--ranks {ranks} --size small --steps 5 --microbatch 1 --set compile=false"
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node={ranks}"


@attrs.frozen(kw_only=True)
class HourStep:
    """One command of the hour. {ranks} in it: as many GPUs as take part, 1, 2, 4 or 8."""

    name: str
    command: str  # of Python, in the repository's root
    dry_run: str  # the same at a tiny size
    minutes: float  # limit; those of all steps fit into an hour
    fills: str
    least_gpus: int = 1


STEPS = (
    HourStep(
        name="preflight",
        command="benchmarks/gpu_hour_preflight.py",
        dry_run="benchmarks/gpu_hour_preflight.py --largest small",
        minutes=2,
        fills="nothing: where it fails, the hour ends before it has cost anything",
    ),
    HourStep(
        name="correctness-elastic",
        command="benchmarks/correctness.py elastic",
        dry_run="benchmarks/correctness.py elastic --emulated --steps 2 --ranks {ranks}",
        minutes=7,
        fills="docs/status.md: same bits on 1, 2, 4, 8 ranks; same bits on one layout (self-test); torch.compile",
    ),
    HourStep(
        name="correctness-losses",
        command="benchmarks/correctness.py losses",
        dry_run="benchmarks/correctness.py losses --emulated --steps 2",
        minutes=4,
        fills="docs/status.md: attention kernel; Tokens/s needs it: a fast wrong step is worth nothing",
    ),
    HourStep(
        name="correctness-resume",
        command="benchmarks/correctness.py resume --steps 200",
        dry_run="benchmarks/correctness.py resume --emulated --steps 40",
        minutes=3,
        fills="docs/status.md: kill, resume, replay to the same bits",
    ),
    HourStep(
        name="speed-124M",
        command="benchmarks/train_speed.py --sizes 124M --steps 30",
        dry_run=SMALL_SPEED + " --step-tokens 512",
        minutes=3,
        fills="docs/performance.md: one H100, 124M; docs/status.md: Tokens/s, MFU",
    ),
    HourStep(
        name="speed-124M-many",
        command="benchmarks/train_speed.py --sizes 124M --steps 30 --ranks {ranks} --parallel ddp fsdp",
        dry_run=SMALL_SPEED + " --step-tokens 256 --ranks {ranks} --parallel ddp fsdp",
        minutes=4,
        fills="docs/performance.md: eight H100, 124M",
        least_gpus=2,
    ),
    HourStep(
        name="bus-bandwidth",
        command=f"{TORCHRUN} benchmarks/bus_bandwidth.py",
        dry_run=f"{TORCHRUN} benchmarks/bus_bandwidth.py --mebibytes 1",
        minutes=1,
        fills="docs/performance.md: eight H100, NCCL's bandwidth",
        least_gpus=2,
    ),
    HourStep(
        name="speed-1.5B-many",
        command="benchmarks/train_speed.py --sizes 1.5B --steps 15 --ranks {ranks} --parallel ddp fsdp",
        dry_run=SMALL_SPEED + " --step-tokens 256 --ranks {ranks} --parallel fsdp",
        minutes=6,
        fills="docs/performance.md: eight H100, 1.5B",
        least_gpus=2,
    ),
    HourStep(
        name="speed-1.5B",
        command="benchmarks/train_speed.py --sizes 1.5B --steps 15 --step-tokens 262144",
        dry_run=SMALL_SPEED + " --step-tokens 256 --set loss_chunks=2",
        minutes=5,
        fills="docs/performance.md: one H100, 1.5B",
    ),
    HourStep(
        name="communication",
        command="benchmarks/communication.py exposed --ranks {ranks}",
        dry_run=f"benchmarks/communication.py exposed {SMALL_STEPS} --parallel fsdp --determinism elastic",
        minutes=6,
        fills="docs/exactness.md: cost of elastic on GPUs, exposed communication",
        least_gpus=2,
    ),
    HourStep(
        name="host",
        command="benchmarks/communication.py host --ranks {ranks}",
        dry_run=f"benchmarks/communication.py host {SMALL_STEPS} --parallel ddp --determinism off",
        minutes=3,
        fills="docs/performance.md: host time of a step",
    ),
    HourStep(
        name="memory",
        command="benchmarks/memory.py --sizes 124M 1.5B --cards h100-80gb",
        dry_run="benchmarks/memory.py --sizes small --cards h100-80gb",
        minutes=4,
        fills="docs/memory.md: accuracy; docs/status.md: memory prediction",
    ),
    HourStep(
        name="outside-memory",
        command="benchmarks/outside_memory.py --ranks {ranks}",
        dry_run="benchmarks/outside_memory.py runs/quickstart --ranks {ranks} --set compile=false",
        minutes=2,
        fills="docs/memory.md: CUDA's context and NCCL, predicted without a measurement",
    ),
    HourStep(
        name="batch-search",
        command="find_batch_size.py runs/8xh100 --world-size {ranks}",
        dry_run="find_batch_size.py runs/quickstart --world-size {ranks} --set compile=false",
        minutes=2,
        fills="docs/status.md: largest micro-batch by trial",
    ),
    HourStep(
        name="kernels",
        command="benchmarks/kernels.py runs/1xh100 microbatch_size=64",
        dry_run="benchmarks/kernels.py runs/quickstart compile=false",
        minutes=1,
        fills="docs/money.md: the roofline's shares",
    ),
    HourStep(
        name="kernels-many",
        command=f"{TORCHRUN} benchmarks/kernels.py runs/8xh100",
        dry_run=f"{TORCHRUN} benchmarks/kernels.py runs/quickstart compile=false",
        minutes=1,
        fills="docs/performance.md: eight H100, NCCL's share of the kernels' time",
        least_gpus=2,
    ),
    HourStep(
        name="speed-350M",
        command="benchmarks/train_speed.py --sizes 350M --steps 15",
        dry_run=SMALL_SPEED + " --step-tokens 256",
        minutes=3,
        fills="docs/performance.md: one H100, 350M",
    ),
    HourStep(
        name="speed-774M",
        command="benchmarks/train_speed.py --sizes 774M --steps 15 --step-tokens 262144",
        dry_run=SMALL_SPEED + " --step-tokens 256",
        minutes=3,
        fills="docs/performance.md: one H100, 774M",
    ),
)


def hour_steps(gpus: int) -> list[HourStep]:
    """Return the steps that so many GPUs can take."""
    return [step for step in STEPS if gpus >= step.least_gpus]
