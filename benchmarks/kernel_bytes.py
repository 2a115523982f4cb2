"""Bytes that the kernels of a training step move: torch.compile's own count, and the tensors of other operators.

tests/fakegpu/run python benchmarks/kernel_bytes.py [--sizes 124M 1.5B] [--microbatch 16] [--world-size 8 --elastic]

Emulated GPUs (tests/fakegpu/README.md) give the same counts as real ones, because counting bytes needs no computation.
A step has one micro-batch, on a single rank or on rank 0 of --world-size ranks. training/planning/throughput.py uses
these counts. The table leaves out collectives. It also leaves out matrix products and attention, because their time
depends on their FLOPs.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import attrs
import bench
import torch
from bench import GROUP_SECONDS, SIZES, WARM_UP, Size
from emulated_steps import lone_rank
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.config.train_config import load_run
from training.exactness import row_sums
from training.parallel.process_group import Ranks, start, stop
from training.replay.self_test import random_batches
from training.step import train_step

SHOWN_KERNELS = 12  # number of kernels in the table, for each kind
LOSS = re.compile(r"nll_loss|log_softmax|cross_entropy")
# Operators that move no data, and operators whose time depends on their FLOPs.
VIEWS = re.compile(
    r"view|transpose|t\.|slice|split|detach|alias|expand|permute|(un)?squeeze|select|empty|new_empty|as_strided|reshape"
)
PRODUCTS = re.compile(r"mm|addmm|bmm|.*attention")


@attrs.define
class KernelBytes:
    """The bytes of a step, by the name of the kernel or operator."""

    compiled: Counter[str] = attrs.field(factory=Counter)
    eager: Counter[str] = attrs.field(factory=Counter)
    calls: Counter[str] = attrs.field(factory=Counter)

    @property
    def block_bytes(self) -> int:
        """The bytes that the compiled kernels of the blocks read and write."""
        return sum(moved for name, moved in self.compiled.items() if not LOSS.search(name))

    @property
    def loss_bytes(self) -> int:
        """The bytes that the compiled kernels of the head and the loss read and write."""
        return sum(moved for name, moved in self.compiled.items() if LOSS.search(name))


def main(
    *,
    sizes: tuple[Size, ...] = ("124M",),
    microbatch: int = 16,
    world_size: int = 1,
    elastic: bool = False,
    set: tuple[str, ...] = (),
) -> None:
    """Print a table for each size. With --elastic, also print the bytes that `determinism` "elastic" adds."""
    inductor_config.benchmark_kernel = True  # makes kernels record their bytes
    ranks = lone_rank(world_size) if world_size > 1 else start("cuda", GROUP_SECONDS)
    for size in sizes:
        model = SIZES[size]
        moved = measure(size, microbatch, set, ranks)
        tokens = microbatch * model.context_length
        by_layer, by_row = tokens * model.n_layers * model.emb_dim, tokens * model.padded_vocab_size
        rows = [
            [name, f"{moved.calls[name]:,}", f"{total / 1e9:.2f}", f"{total / by_layer:.1f}"]
            for kind in (moved.compiled, moved.eager)
            for name, total in kind.most_common(SHOWN_KERNELS)
        ]
        print(bench.table([f"{size}, micro-batch {microbatch}", "calls", "GB", "bytes per token, layer, C"], rows))
        print(
            f"blocks, compiled: {moved.block_bytes / by_layer:.1f} bytes per token, layer and C\n"
            f"loss, compiled: {moved.loss_bytes / by_row:.1f} bytes per token and row of the vocabulary\n"
            f"operators: {moved.eager.total() / 1e9:.2f} GB per step\n",
            flush=True,
        )
        if elastic:
            ordered = measure(size, microbatch, (*set, "determinism=elastic"), ranks)
            extra = (ordered.eager.total() - moved.eager.total()) / 1e9
            print(f"elastic: {extra:.2f} GB more per step", flush=True)
    if world_size == 1:
        stop()
    os._exit(0)  # leaving the process group would wait for the other ranks


def measure(size: Size, microbatch: int, settings: tuple[str, ...], ranks: Ranks) -> KernelBytes:
    """Train some steps, and count the bytes of the last one."""
    model = SIZES[size]
    keys = {"dataset": "random", "min_train_tokens": 10**9, "microbatch_size": microbatch, "clipping_max_norm": 1.0}
    with TemporaryDirectory() as folder:
        run = load_run(bench.write_run(Path(folder), model, keys), settings)
    state, step_settings = bench.build(run, ranks)
    next_batch = random_batches(step_settings.layout, model.vocab_size, ranks)
    for step in range(WARM_UP):
        train_step(state, step_settings, step, next_batch)
    moved = KernelBytes()
    with _compiled_kernels(moved), _row_sums(moved), _Operators(moved):
        train_step(state, step_settings, WARM_UP, next_batch)
    return moved


@contextmanager
def _compiled_kernels(moved: KernelBytes) -> Iterator[None]:
    """Count the bytes that compiled kernels move, according to torch.compile."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # needs Triton

    plain: Any = CachingAutotuner.run

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        name = kernel.fn.__name__
        moved.calls[name] += 1
        moved.compiled[name] += int(1e9 * kernel.inductor_meta["kernel_num_gb"])
        return plain(kernel, *args, **options)

    with patch.object(CachingAutotuner, "run", run):
        yield


@contextmanager
def _row_sums(moved: KernelBytes) -> Iterator[None]:
    """Count the bytes of the matrices that the kernel of the exact gradient norm reads."""
    plain = row_sums.by_kernel

    def by_kernel(tensors: list[torch.Tensor]) -> torch.Tensor:
        moved.calls["row sums"] += 1
        moved.eager["row sums"] += sum(tensor.nbytes for tensor in tensors if tensor.dim() > 1)
        return plain(tensors)

    with patch.object(row_sums, "by_kernel", by_kernel):
        yield


class _Operators(TorchDispatchMode):
    """Counts the bytes that operators outside of compiled graphs read and write."""

    def __init__(self, moved: KernelBytes):
        super().__init__()
        self._moved = moved

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # graphs that are already compiled are not compiled again

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = str(operator).partition(".")[2]
        if operator.namespace != "c10d" and not VIEWS.match(name) and not PRODUCTS.match(name):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            sizes = {
                (leaf.data_ptr(), leaf.numel()): leaf.numel() * leaf.element_size() for leaf in tensors if leaf.is_cuda
            }
            updated = [] if name.startswith(("copy_", "_foreach_copy_")) else _updated(operator, args)
            self._moved.calls[name] += 1
            self._moved.eager[name] += sum(sizes.values()) + sum(tensor.nbytes for tensor in updated if tensor.is_cuda)
        return result


def _updated(operator: Any, args: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator reads and writes."""
    outputs = [
        passed
        for passed, argument in zip(args, operator._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


if __name__ == "__main__":
    bench.run(main)
