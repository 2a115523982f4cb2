"""Several nodes on paper: tokens/s, exposed communication, checkpoints and lost time, from bytes and link speeds.

python benchmarks/scale.py [--size 124M] [--nodes 1 8 64] [--node-link 3 12.5 50 400]

A simulation: nothing of it is measured on several machines. Computation is the estimate of train.py --plan, shared out
evenly; communication is that of the sum on two levels, whose bytes are counted at the cable between two network
namespaces; what the last micro-batch's backward pass does not hide is exposed. The help has the other assumptions.
"""

import attrs
import command

from model.config import GPT2_SIZES, ModelConfig, parameter_count
from training.hardware.gpus import find_gpu, known_gpus
from training.planning.several_nodes import Links, StepTime, step_time
from training.planning.throughput import roofline

NODE_GPUS = 8
DISK = 1.0  # GB/s of a node's disk
STATE_BYTES = 12  # of a parameter in a checkpoint: weight and AdamW's moments, fp32


@attrs.frozen(kw_only=True)
class Cluster:
    """Assumptions about machines."""

    gpu: str = "h100-80gb"
    links: Links
    failures_per_gpu_hour: float  # each ends the job
    restart_seconds: float = 180.0  # noticing included


def simulate(model: ModelConfig, cluster: Cluster, nodes: int, sequences: int) -> StepTime:
    """Return a step of `sequences`, on all GPUs. A GPU computes whole sequences: the slowest has the most."""
    tokens = -(-sequences // (nodes * NODE_GPUS)) * model.context_length
    compute = tokens / roofline(model, find_gpu(cluster.gpu, known_gpus()))
    return step_time(parameter_count(model), cluster.links, (nodes, NODE_GPUS), compute=compute)


def lost_share(cluster: Cluster, gpus: int, interval_seconds: float) -> float:
    """Return the share of time lost to failures: half an interval between checkpoints, and the restart, of each."""
    return min(1.0, gpus * cluster.failures_per_gpu_hour / 3600 * (interval_seconds / 2 + cluster.restart_seconds))


def main(  # noqa: PLR0913  # each is an assumption
    *,
    size: command.Size = "124M",
    nodes: tuple[int, ...] = (1, 8, 64),
    node_link: tuple[float, ...] = (3.0, 12.5, 50.0, 400.0),
    batch: int = 512,
    host_ms: float = 10.0,
    interval_minutes: float = 10.0,
    failures: float = 2e-5,
) -> None:
    """Print a table.

    Args:
        node_link: GB/s of a node to all others, each direction: 3 is a 25 Gb/s card, 400 eight of 400 Gb/s.
        batch: sequences of a step; the same whatever the number of GPUs.
        host_ms: least milliseconds of a step, which the host needs: 124M under DDP, elastic, took 9 to 15 on two CPUs.
        interval_minutes: between checkpoints.
        failures: of a GPU and hour, each ends the job: Llama 3 had 419 in 54 days on 16,384 H100
            (arXiv 2407.21783, section 3.3.4).
    """
    model = command.TINY if size == "tiny" else GPT2_SIZES[size]
    rows, alone = [], None
    for count in nodes:
        for link in node_link if count > 1 else node_link[:1]:
            cluster = Cluster(links=Links(node=link), failures_per_gpu_hour=failures)
            step = simulate(model, cluster, count, batch)
            seconds = max(step.seconds, host_ms / 1e3)
            speed = batch * model.context_length / seconds
            alone = alone or speed / (count * NODE_GPUS)
            lost = lost_share(cluster, count * NODE_GPUS, 60 * interval_minutes)
            rows.append(
                [
                    f"{count} x {NODE_GPUS}",
                    f"{link:g}" if count > 1 else "-",
                    f"{1e3 * step.compute:.1f}",
                    f"{1e3 * (step.inside + step.across):.1f}",
                    f"{1e3 * step.exposed:.1f}",
                    f"{1e3 * seconds:.1f}",
                    f"{speed:,.0f}",
                    f"{speed / (count * NODE_GPUS) / alone:.0%}",
                    f"{lost:.2%}",
                ]
            )
    heads = ["GPUs", "GB/s a node", "compute ms", "communication ms", "exposed ms", "step ms", "tokens/s", "of linear"]
    print(command.markdown_table([*heads, "lost to failures"], rows))
    save = STATE_BYTES * parameter_count(model) / (DISK * 1e9)
    print(f"\na checkpoint: {save:.1f} s to a disk of 1 GB/s, beside training; on each node without a shared one")


if __name__ == "__main__":
    command.run(main)
