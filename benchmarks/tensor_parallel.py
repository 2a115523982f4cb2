"""Tensor parallelism on this machine's CPUs: whether all layouts give the same bits, and what the shards cost.

python benchmarks/tensor_parallel.py [--networks GPT-2 Llama NanoChat] [--tensor 1 2 4] [--namespaces]
python benchmarks/tensor_parallel.py --bytes | --cost | --dtensor

The benchmark trains each network in 4 tensor shards on all layouts, with torchrun's agent and train.py. Each number of
tensor ranks is combined with the following data-parallel ranks: one rank without a wrapper, two and three ranks with
DDP, two and three ranks with FSDP, and two and four ranks with HSDP on two simulated nodes. The exit status is 1 if a
state hash differs.
"""

import os
import shutil
import time
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from timeit import repeat
from typing import Any, Literal
from unittest.mock import patch

import bench
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from common.errors import BadInput
from model.config import ModelConfig
from model.gpt import GPT
from model.loss import NextTokenLoss
from model.shards import Pieces
from tests import launch
from tests.conftest import TINY_MODEL  # the import sets one thread per rank
from tests.machines import two_machines
from tests.training.parallel.test_layouts import AS_NODES, VARIANTS
from training.config.train_config import load_run
from training.parallel import tensor_shards
from training.parallel.process_group import ALONE, RankGroup, start, stop
from training.planning.throughput import exchange_bytes
from training.telemetry.metrics_log import Metric, read_metrics

Networks = tuple[Literal["GPT-2", "Llama", "NanoChat"], ...]
NETWORKS: Networks = ("GPT-2", "Llama", "NanoChat")
SHARDS, STEPS, REPEATS, ALL_TO_ALL = 4, 4, 30, "torch.distributed.all_to_all_single"
BATCH = {"microbatch_size": 1, "global_batch_size": 6, "checkpoint_interval": STEPS}
SHAPES = ((1, 64, 64), (2, 256, 256), (2, 512, 512))  # sequences, tokens and width, for the comparison with torch


def main(  # noqa: PLR0913  # each argument is an option
    *,
    bytes: bool = False,
    cost: bool = False,
    dtensor: bool = False,
    namespaces: bool = False,
    networks: Networks = NETWORKS,
    precision: tuple[str, ...] = ("fp32", "bf16"),
    tensor: tuple[int, ...] = (1, 2, 4),
) -> None:
    """Print a table.

    Args:
        bytes: print the bytes that a rank receives from other tensor ranks in a micro-batch, as counted here and as
            predicted by the formula of train.py --plan.
        cost: print the time of a micro-batch with all shards in one process, compared with the plain network.
        dtensor: compare our MLP layer on two ranks with torch's DTensor: the minimum time of a forward and backward
            pass, and whether the bits are the same as in one process.
        namespaces: train only HSDP layouts, in two network namespaces; needs root.
        tensor: numbers of tensor-parallel ranks.
    """
    if dtensor:
        print(compare_layers() if "RANK" in os.environ else bench.output_of(2, __file__, "--dtensor"))
    elif cost:
        print(bench.table(["shards in one process", "ms", "ratio"], compare_cost()))
    elif bytes:
        rows = [count_bytes(network, ranks) for network in networks for ranks in tensor if ranks > 1]
        print(bench.table(["network", "ranks", "counted bytes", "formula"], rows))
    else:
        layouts = [*product(tensor, (2, 4), ("hsdp",))]
        if not namespaces:  # with one data-parallel rank, the network is not wrapped
            layouts = [*product(tensor, (1,), ("ddp",)), *product(tensor, (2, 3), ("ddp", "fsdp")), *layouts]
        cases = product(networks, precision)
        rows = [compare_hashes(*case, layouts, namespaces=namespaces) for case in cases]
        print(f"\n{bench.table(['network', 'state', 'layouts', 'hashes', 'seconds'], rows)}")
        raise SystemExit(any(row[3] != "equal" for row in rows))


def compare_hashes(network: str, precision: str, layouts: list[tuple[int, int, str]], *, namespaces: bool) -> list[str]:
    """Train on all layouts, and return a row of the table."""
    variant, began, hashes_by_layout = VARIANTS[f"{network} in {SHARDS} shards, {precision}"], time.monotonic(), []
    with TemporaryDirectory() as folder:
        model = ModelConfig(**TINY_MODEL | variant.model)
        prepared = bench.prepare(Path(folder), model, STEPS, **variant.train | BATCH)
        for tensor, data, parallel in layouts:
            run = shutil.copytree(prepared, Path(folder) / f"{tensor} {data} {parallel}")
            settings = "--set", f"tensor_parallel={tensor}", "--set", f"parallel={parallel}", "--device", "cpu"
            arguments, ranks = ["--hash-every", "1", *settings], tensor * data
            if namespaces:
                processes = on_two_machines(Path(folder), run, ranks // 2, arguments)
            else:
                nodes = {"NODE_SIZE": f"{ranks // (2 if parallel == 'hsdp' else 1)}"}
                processes = [launch.run(AS_NODES, str(run), *arguments, ranks=ranks, environment=nodes)]
            for process in processes:
                if process.returncode:
                    raise BadInput(f"{run.name}: status {process.returncode}: {process.stderr[-2000:]}")
            records = read_metrics(run)
            hashes = [record[Metric.STATE_SHA256] for record in records if Metric.STATE_SHA256 in record]
            hashes_by_layout.append(hashes)
            print(network, precision, tensor, data, parallel, hashes[-1][:12], flush=True)
    first = hashes_by_layout[0]
    equal = all(hashes == first and len(hashes) == STEPS for hashes in hashes_by_layout)
    verdict, seconds = "equal" if equal else "DIFFERENT", f"{time.monotonic() - began:.0f}"
    return [f"{network} {precision}", first[-1][:12], str(len(hashes_by_layout)), verdict, seconds]


def on_two_machines(folder: Path, run: Path, ranks: int, arguments: list[str]) -> list[Any]:
    """Train on two nodes with `ranks` ranks each, in separate network namespaces, and return each node's process."""
    with two_machines(folder) as machines:
        keys: dict[str, Any] = {"master": machines[0].address, "ranks": ranks, "environment": {"OMP_NUM_THREADS": "1"}}
        nodes = [machine.train(run, *arguments, **keys) for machine in machines]
        return [launch.finish(node, bench.GROUP_SECONDS) for node in nodes]


def count_bytes(network: str, ranks: int) -> list[str]:
    """Count the bytes that rank 0 receives in a micro-batch of one sequence in bf16. The other ranks do not exist."""
    variant, received_bytes = VARIANTS[f"{network} in {SHARDS} shards, bf16"], 0

    def exchange(output: Tensor, shard: Tensor, **_: Any) -> None:
        nonlocal received_bytes
        received_bytes += output.nbytes // ranks * (ranks - 1)
        output.view(-1, shard.numel()).copy_(shard.flatten())

    with TemporaryDirectory() as folder:
        keys = variant.train | BATCH | {"tensor_parallel": ranks}
        run = load_run(bench.prepare(Path(folder), ModelConfig(**TINY_MODEL | variant.model), STEPS, **keys), [])
    model, tokens = filled(run.model, SHARDS, RankGroup(rank=0, size=ranks)), torch.zeros(1, 32, dtype=torch.int64)
    with patch.object(tensor_shards, "all_gather_single", exchange), patch(ALL_TO_ALL, exchange):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, tokens)
        loss.backward()
    formula_bytes = tokens.numel() * exchange_bytes(run.model, run.train)
    return [network, f"{ranks}", f"{received_bytes:,}", f"{formula_bytes:,.0f}"]


def compare_cost() -> list[list[str]]:
    """Return rows with the minimum milliseconds of a forward and backward pass for each number of shards.

    One shard is the plain network.
    """
    config = ModelConfig(**TINY_MODEL | {"context_length": 256, "emb_dim": 512, "n_heads": 8, "drop_rate": 0.0})
    plain = NextTokenLoss(GPT(config))
    models: dict[int, Any] = {1: plain} | {shards: filled(config, shards, ALONE) for shards in (2, 4, 8)}
    tokens, times = torch.randint(config.vocab_size, (4, 256)), dict.fromkeys(models, float("inf"))
    for _ in range(REPEATS):  # in turns, because the machine's speed changes
        for shards, model in models.items():
            began = time.perf_counter()
            model(tokens, tokens).backward()
            times[shards] = min(times[shards], time.perf_counter() - began)
    return [[f"{shards}", f"{1e3 * least:.0f}", f"{least / times[1]:.2f}"] for shards, least in times.items()]


def filled(config: ModelConfig, shards: int, tensor: RankGroup) -> Any:
    """Return the shards that a rank holds. Their weights are random, and differ from shard to shard."""
    with torch.device("meta"):
        model: Any = tensor_shards.in_shards(NextTokenLoss(GPT(config)), shards, tensor)
    model.to_empty(device="cpu")
    for shard, network in zip(model.network.exchange.local_shards, model.network.shards, strict=True):
        torch.manual_seed(shard)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def compare_layers() -> str:
    """Return a table that compares torch's DTensor with our layer, for a norm and an MLP on two ranks.

    The table has the milliseconds of a step, and says whether a single process gives the same bits as this rank.
    """
    ranks, rows, mesh = start("cpu", bench.GROUP_SECONDS, 2), [], init_device_mesh("cpu", (2,))
    for sequences, tokens, width in SHAPES:
        config = ModelConfig(**TINY_MODEL | {"context_length": tokens, "emb_dim": width})
        together, alone = (partial(run_layer, filled(config, 2, tensor).network) for tensor in (ranks.tensor, ALONE))
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        torch_layer = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(approximate="tanh"), down)
        plan = SequenceParallel(), ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
        x = torch.randn(sequences, tokens, width)
        local_x = (xs := [piece.contiguous() for piece in x.chunk(2, 1)])[ranks.rank]
        expected = step(torch_layer, x).chunk(2, 1)[ranks.rank]
        dtensor_layer = parallelize_module(torch_layer, mesh, dict(zip("013", plan, strict=True)))
        same_bits = [torch.equal(step(dtensor_layer, local_x), expected)]
        same_bits.append(torch.equal(step(together, local_x)[0], step(alone, *xs)[ranks.rank]))
        times = [
            min(repeat(partial(step, layer, local_x), number=1, repeat=REPEATS)) for layer in (dtensor_layer, together)
        ]
        cells = [*(f"{1e3 * seconds:.2f}" for seconds in times), f"{times[0] / times[1]:.2f}"]
        cells += ["equal" if same else "differ" for same in same_bits]
        rows.append([f"{sequences} x {tokens} x {width}", *cells])
    stop()
    columns = ["layer", "DTensor ms", "ours ms", "ratio", "DTensor bits", "our bits"]
    return bench.table(columns, rows) if ranks.coordinates else ""


def run_layer(network: Any, *pieces: Tensor) -> Any:
    block = network.blocks[0]
    return block.mlp(block.mlp_norm(Pieces(pieces))).tensors


def step(model: Any, *inputs: Tensor) -> Any:
    outputs = model(*inputs)
    torch.autograd.backward(outputs, outputs)
    return outputs


if __name__ == "__main__":
    bench.run(main)
