"""FSDP2: groups of blocks, the precision and number of all-gathers, and the same bits as without FSDP."""

import weakref
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from model.axes import axes_of
from model.config import GPT2_SIZES, ModelConfig
from model.gpt import GPT, Block, initial_weights, initialize
from model.loss import NextTokenLoss
from tests.conftest import TINY_MODEL, MakeRun, complete, metrics
from tests.training.conftest import Watched
from tests.training.parallel.conftest import as_rank, counting, default_ranks
from training.checkpoints.initial_weights import copy_local_rows
from training.config.key_groups import OptimizationOptions
from training.optimizer import Optimizer
from training.parallel.fsdp import block_groups
from training.parallel.mesh import held_rows, local_tensor
from training.parallel.wrap import Parallel, parallelize
from training.precision import AUTOCAST_DTYPES, Numerics, autocast

CPU = torch.device("cpu")
SIX_LAYERS = {"n_layers": 6}  # FSDP groups them in pairs


def wrapped(
    precision: str, determinism: str = "off", *, recompute_blocks: bool = False, network: GPT | None = None
) -> Parallel:
    model = NextTokenLoss(network or GPT(ModelConfig(**TINY_MODEL | SIX_LAYERS)), recompute_blocks=recompute_blocks)
    numerics = Numerics(determinism=determinism, precision=precision, compiled=False)
    return parallelize(model, "fsdp", numerics, 6, default_ranks())


def run_pass(parallel: Parallel, precision: str, *, last: bool) -> None:
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with parallel.gradient_sync(enabled=last):
        with autocast(precision, CPU):
            loss = parallel.model(tokens, tokens)
        loss.backward()


@pytest.mark.parametrize(
    ("size", "groups", "length"), [("124M", 4, 3), ("350M", 12, 2), ("774M", 18, 2), ("1.5B", 48, 1)]
)
def test_only_small_blocks_share_a_group(size: str, groups: int, length: int) -> None:
    with torch.device("meta"):
        blocks: list[torch.nn.Module] = [Block(GPT2_SIZES[size], layer) for layer in range(GPT2_SIZES[size].n_layers)]
    block_lists = block_groups(blocks)
    assert [len(group) for group in block_lists] == [length] * groups
    assert [block for group in block_lists for block in group] == blocks


def test_the_last_group_may_be_shorter() -> None:
    assert [len(group) for group in block_groups([torch.nn.Linear(2, 2) for _ in range(11)])] == [3, 3, 3, 2]
    assert [len(group) for group in block_groups([torch.nn.Linear(2, 2) for _ in range(2)])] == [1, 1]


class LiveBytes:
    """Measures the peak memory of the tensors that are passed to `note`."""

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def note(self, _: Any, result: Any) -> None:
        if isinstance(result, torch.Tensor) and not result.is_meta and not isinstance(result, DTensor):
            self.tensors.append(weakref.ref(result))
            live = [tensor.untyped_storage() for tensor in (ref() for ref in self.tensors) if tensor is not None]
            self.most = max(self.most, sum({storage.data_ptr(): storage.nbytes() for storage in live}.values()))


@pytest.mark.parametrize("determinism", ["off", "elastic"])
def test_ranks_hold_one_shard_and_one_full_tensor(determinism: str) -> None:
    config = ModelConfig(**TINY_MODEL | SIX_LAYERS | {"emb_dim": 256})
    weights_by_name = {name: value for name, value in GPT(config).state_dict().items()}
    network_bytes, largest = (take(value.nbytes for value in weights_by_name.values()) for take in (sum, max))
    with as_rank(1, of=4):
        with Watched((live := LiveBytes()).note):
            with torch.device("meta"):
                network = GPT(config)
            parallel = wrapped("bf16", determinism, network=network)
            for name, values in initial_weights(parallel.network, 3):
                copy_local_rows(parallel.named_parameters()[name], values)
        shards = {name: local_tensor(value) for name, value in parallel.named_parameters().items()}
        assert sum(shard.nbytes for shard in shards.values()) < 0.3 * network_bytes
        assert live.most < 0.3 * network_bytes + 2 * largest < 0.6 * network_bytes
        initialize(reference := GPT(config), 3)
        for name, parameter in parallel.named_parameters().items():
            first, local = held_rows(parameter)
            assert torch.equal(local, reference.get_parameter(name)[first : first + len(local)])


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_gathered_matrices_have_autocasts_precision(precision: str) -> None:
    with as_rank(0, of=2):
        parallel = wrapped(precision)
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        with autocast(precision, CPU):
            parallel.model(tokens, tokens)
        if precision == "fp32":
            parallel.network.blocks[0].unshard()
        gathered = {name: parameter.dtype for name, parameter in parallel.network.named_parameters()}
        shards = {parameter.dtype for parameter in parallel.named_parameters().values()}
    low = {name for name in gathered if name.endswith((".qkv.weight", ".output.weight", ".up.weight", ".down.weight"))}
    assert {gathered[name] for name in low} == {AUTOCAST_DTYPES.get(precision, torch.float32)}
    assert {gathered[name] for name in gathered.keys() - low} == shards == {torch.float32}


@pytest.mark.parametrize("determinism", ["off", "elastic"])
@pytest.mark.parametrize(
    ("precision", "recompute_blocks", "gathers"),
    [("bf16", False, 1 + 3), ("bf16", True, 1 + 3 * 2 * 3), ("fp32", False, 1 + 3 * 2 * 3)],
)
def test_blocks_are_gathered_once_if_memory_allows(
    determinism: str, precision: str, recompute_blocks: bool, gathers: int
) -> None:
    with as_rank(0, of=2):
        parallel = wrapped(precision, determinism, recompute_blocks=recompute_blocks)
        for _ in range(2):
            with counting() as counts:
                for micro_step in range(3):
                    run_pass(parallel, precision, last=micro_step == 2)
            # Embeddings and norms are gathered once. The three groups of blocks are gathered either only once or
            # in each forward and backward pass.
            assert counts["_allgather_base_"] == gathers
            reduction = {"off": "_reduce_scatter_base_", "elastic": "alltoall_base_"}[determinism]
            assert counts[reduction] == 1 + 3
            gathered = [
                name
                for name, parameter in parallel.network.named_parameters()
                if parameter is not parallel.named_parameters()[name]
            ]
            assert gathered == []  # all parameters are shards again, because updates need shards


def test_fsdp_and_ddp_agree_on_two_ranks(make_run: MakeRun) -> None:
    # Two ranks' gradients can be added in only one order. The norm adds more than two numbers, so clipping is off.
    hashes = []
    for parallel in ("ddp", "fsdp"):
        keys = {"precision": "bf16", "determinism": "off", "clipping_max_norm": None, "validation_interval": None}
        run = make_run(parallel, SIX_LAYERS, parallel=parallel, **keys)
        complete(run, "--hash-every", "1", "--max-steps", "3", ranks=2)
        hashes.append(metrics(run, "state_sha256"))
        weights = load_file(run / "checkpoints" / "latest" / "model.safetensors")
        assert weights["token_embedding.weight"].shape == (257, 32) and "blocks.1.attention.qkv.weight" in weights
        assert not any("module" in name or "_orig_mod" in name for name in weights)
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0].values())) == 3


def test_the_optimizer_updates_local_shards_in_place() -> None:
    with as_rank(0, of=2):
        parallel = wrapped("bf16")
        parameters = parallel.named_parameters()
        axes = {name: axes_of(name, parallel.network.config) for name in parameters}
        optimizer = Optimizer(parameters, axes, OptimizationOptions(learning_rate=1.0, weight_decay=0.0), CPU)
        before = {name: local_tensor(parameter).clone() for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(torch.zeros(()))
        for name, parameter in parameters.items():
            assert isinstance(parameter, DTensor) and isinstance(optimizer.state_tensors["exp_avg"][name], DTensor)
            assert torch.allclose(before[name] - local_tensor(parameter), torch.ones(()))
            assert (local_tensor(optimizer.state_tensors["exp_avg_sq"][name]) > 0).all()
        updated = [
            parameter for part in optimizer.parts for group in part.param_groups for parameter in group["params"]
        ]
    assert len(updated) == len(parameters)
    assert not any(isinstance(parameter, DTensor) for parameter in updated)
    assert all(parameter.grad is None for parameter in updated)
