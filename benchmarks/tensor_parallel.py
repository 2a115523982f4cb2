"""Tensor parallelism on this machine's CPUs: the bits of all layouts, bytes exchanged, and a layer of torch's beside.

python benchmarks/tensor_parallel.py [--networks GPT-2 Llama NanoChat] [--tensor 1 2 4] [--data 1 2 3]
python benchmarks/tensor_parallel.py --bytes
python benchmarks/tensor_parallel.py --dtensor

The first trains each network in 4 tensor shards on every layout, by torchrun and train.py: tensor ranks x data-parallel
ranks x wrapper, and HSDP on two nodes that it pretends. Exit status 1 where a state hash of a step differs.
"""

import copy
import os
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from timeit import repeat
from typing import Any, Literal
from unittest import mock

import bench
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench import GROUP_SECONDS, ROOT, launcher
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from model.config import ModelConfig
from model.gpt import GPT
from model.loss import NextTokenLoss
from model.shards import Gather, ShardExchange, Sum
from tests.conftest import TINY_MODEL  # sets one thread a rank
from tests.training.parallel.test_layouts import AS_NODES, VARIANTS
from training.config.train_config import load_run
from training.parallel import tensor_shards
from training.parallel.process_group import RankGroup, start, stop
from training.planning import throughput
from training.telemetry.metrics_log import read_metrics

Network = Literal["GPT-2", "Llama", "NanoChat"]
SHARDS, STEPS, MICROBATCHES = 4, 4, 6
SHAPES = ((1, 64, 64), (2, 256, 256), (2, 512, 512))  # of the layer beside torch's: sequences, tokens, width
PLAN = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))}
PLAN |= {"3": RowwiseParallel(output_layouts=Shard(1))}
REPEATS = 30


def main(
    *,
    bytes: bool = False,
    dtensor: bool = False,
    networks: tuple[Network, ...] = ("GPT-2", "Llama", "NanoChat"),
    tensor: tuple[int, ...] = (1, 2, 4),
    data: tuple[int, ...] = (1, 2, 3),
) -> None:
    """Print a table.

    Args:
        bytes: bytes that a rank gets from those that share its layers in a micro-batch, counted and by the formula.
        dtensor: an MLP layer forward and backward on two ranks, and torch's by DTensor: host time and bits.
        tensor: numbers of ranks that share layers.
        data: data-parallel ranks under DDP and FSDP; HSDP has 2 and 4.
    """
    if dtensor:
        print(compare_layers() if "RANK" in os.environ else bench.output_of(2, __file__, "--dtensor"), end="")
    elif bytes:
        rows = [count_bytes(network, ranks) for network in networks for ranks in tensor if ranks > 1]
        print(bench.table(["network", "ranks", "counted bytes", "formula"], rows))
    else:
        layouts = [*product(tensor, data, ("ddp", "fsdp")), *product(tensor, (2, 4), ("hsdp",))]
        rows = [compare_hashes(*case, layouts) for case in product(networks, ("fp32", "bf16"))]
        print(f"\n{bench.table(['network', 'state', 'layouts', 'hashes', 'seconds'], rows)}")
        sys.exit(any(row[3] != "equal" for row in rows))


def compare_hashes(network: Network, precision: str, layouts: list[tuple[int, int, str]]) -> list[str]:
    """Train on all layouts; return a row of the table."""
    began, found = time.monotonic(), []
    for layout in layouts:
        found.append(train(f"{network} in {SHARDS} shards, {precision}", *layout))
        print(network, precision, *layout, found[-1][-1][:12], file=sys.stderr, flush=True)
    verdict = "equal" if len(set(found)) == 1 and len(found[0]) == STEPS else "DIFFERENT"
    seconds = f"{time.monotonic() - began:.0f}"
    return [f"{network} {precision}", found[0][-1][:12], f"{len(layouts)}", verdict, seconds]


def train(variant: str, tensor: int, data: int, parallel: str) -> tuple[str, ...]:
    """Train on a layout; return the hashes of its state after each step, or the end of what a failure says."""
    ranks, nodes = tensor * data, 2 if parallel == "hsdp" else 1
    keys = VARIANTS[variant].train | {"tensor_parallel": tensor, "parallel": parallel, "microbatch_size": 1}
    with TemporaryDirectory() as folder:
        model = ModelConfig(**TINY_MODEL | VARIANTS[variant].model)
        run = bench.prepare(Path(folder), model, STEPS, global_batch_size=MICROBATCHES, checkpoint_interval=9, **keys)
        command = [*launcher(ranks), str(AS_NODES), str(run), "--device", "cpu", "--hash-every", "1"]
        environment = os.environ | {"NODE_SIZE": str(ranks // nodes), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            return ("failed",)
        return tuple(each["state_sha256"] for each in read_metrics(run) if "state_sha256" in each)


def count_bytes(network: Network, ranks: int) -> list[str]:
    """Count what rank 0 gets in a micro-batch of one sequence, bf16; the other ranks do not exist."""
    variant, counted = VARIANTS[f"{network} in {SHARDS} shards, bf16"], 0

    def exchange(result: Tensor, given: Tensor, **_: Any) -> None:
        nonlocal counted
        counted += result.nbytes // ranks * (ranks - 1)
        result.view(-1, given.numel()).copy_(given.flatten())

    with TemporaryDirectory() as folder:
        keys = variant.train | {"tensor_parallel": ranks, "microbatch_size": 1, "global_batch_size": 1}
        run = load_run(bench.prepare(Path(folder), ModelConfig(**TINY_MODEL | variant.model), 1, **keys), [])
    model = in_shards(run.model, SHARDS, RankGroup(rank=0, size=ranks)).to_empty(device="cpu").train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    tokens = torch.zeros(1, run.model.context_length, dtype=torch.int64)
    collectives = (tensor_shards, "all_gather_single"), (dist, "all_to_all_single")
    with mock.patch.object(*collectives[0], exchange), mock.patch.object(*collectives[1], exchange):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, tokens)
        loss.backward()
    formula = getattr(throughput, "exchange_bytes", None)  # of the planner
    return [network, f"{ranks}", f"{counted:,}", f"{formula(run.model, run.train, 1):,}" if formula else "-"]


def in_shards(config: ModelConfig, shards: int, tensor: RankGroup) -> Any:
    with torch.device("meta"):
        return tensor_shards.in_shards(NextTokenLoss(GPT(config)), 1, shards, tensor)


class Layer(nn.Module):
    """Norm and MLP: pieces of a sequence -> pieces of the output, in the shards of this process."""

    def __init__(self, whole: Any, exchange: ShardExchange):
        super().__init__()
        self.norm, self.gelu, self.exchange = whole[0], whole[2], exchange
        parts = zip(whole[1].weight.chunk(2), whole[1].bias.chunk(2), whole[3].weight.chunk(2, 1), strict=True)
        self.weights = [[part.detach().requires_grad_() for part in each] for each in parts]

    def forward(self, *pieces: Tensor) -> tuple[Tensor, ...]:
        inputs = Gather.apply(self.exchange, *map(self.norm, pieces))
        shards = [(x, *self.weights[shard]) for x, shard in zip(inputs, self.exchange.own, strict=True)]
        return Sum.apply(self.exchange, *(F.linear(self.gelu(F.linear(x, *up)), down) for x, *up, down in shards))


def compare_layers() -> str:
    """Return a table of both layers on two ranks: milliseconds, and whether one process has the bits of this rank."""
    ranks, rows, mesh = start("cpu", GROUP_SECONDS, 2), [], init_device_mesh("cpu", (2,))
    shared = in_shards(ModelConfig(**TINY_MODEL), 2, ranks.tensor).network.exchange
    for shape in SHAPES:
        torch.manual_seed(0)
        up, down = nn.Linear(shape[2], 4 * shape[2]), nn.Linear(4 * shape[2], shape[2], bias=False)
        whole: Any = nn.Sequential(nn.LayerNorm(shape[2]), up, nn.GELU(approximate="tanh"), down)
        xs = [piece.contiguous() for piece in torch.randn(shape).chunk(2, 1)]
        own, torchs = [xs[ranks.rank]], parallelize_module(copy.deepcopy(whole), mesh, PLAN)
        alone, together = Layer(whole, ShardExchange(shards=2, local=2)), Layer(whole, shared)
        found = [*step(torchs, own), *step(together, own), together.weights[ranks.rank][0].grad]
        wanted = [step(whole, [torch.cat(xs, 1)])[0].chunk(2, 1)[ranks.rank], step(alone, xs)[ranks.rank]]
        wanted.append(alone.weights[ranks.rank][0].grad)
        theirs, *ours = [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)]
        times = [median(repeat(partial(step, each, own), number=1, repeat=REPEATS)) for each in (torchs, together)]
        cells = [*(f"{1e3 * each:.2f}" for each in times), f"{times[0] / times[1]:.2f}"]
        rows.append([f"{shape}", *cells, *("equal" if each else "differ" for each in (theirs, all(ours)))])
    stop()
    columns = ["sequences, tokens, width", "DTensor ms", "ours ms", "ratio", "DTensor bits", "our bits"]
    return f"{bench.table(columns, rows)}\n" if ranks.rank == 0 else ""


def step(model: nn.Module, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Run a layer forward and backward; return its outputs."""
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, outputs)
    return outputs


if __name__ == "__main__":
    bench.run(main)
