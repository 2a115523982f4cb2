"""Muon matches the published formula and torch's Muon, can split queries, keys and values, and divides work evenly."""

import math
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.axes import Axes, axes_of
from model.config import GPT2_SIZES, ModelConfig
from model.counts import meta_network
from training.config.key_groups import OptimizationOptions
from training.optimizer import Optimizer
from training.optimizers import muon
from training.optimizers.muon import Muon, matrices_of, orthogonalization_flops, orthogonalize
from training.optimizers.update_rule import Placement, rate_group
from training.parallel import matrix_shares
from training.parallel.mesh import ON_ONE_RANK, Spread
from training.parallel.process_group import ALONE, RankGroup

CONFIG = ModelConfig(vocab_size=257, context_length=8, emb_dim=12, n_heads=3, n_layers=1)
NAMES = [f"blocks.0.{layer}.weight" for layer in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")]
AXES = {name: axes_of(name, CONFIG) for name in NAMES}
SHAPES = {name: axes.shape for name, axes in AXES.items()}
PLAIN = OptimizationOptions(optimizer="muon", learning_rate=0.02)
SPLIT = attrs.evolve(PLAIN, muon_split_qkv=True)
CPU = torch.device("cpu")
Matrix = npt.NDArray[np.float64]


def make(
    options: OptimizationOptions, kind: torch.dtype = torch.float32, **settings: Any
) -> tuple[dict[str, Any], Muon]:
    """Return parameters, and their Muon optimizer, whose momentum is zero."""
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(kind)) for name, shape in SHAPES.items()
    }
    placement = Placement(device=CPU, make_spread=lambda: ON_ONE_RANK, axes=AXES)
    muon_optimizer = Muon(parameters, options, placement, **settings)
    for parameter in parameters.values():
        muon_optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return parameters, muon_optimizer


def give_gradients(parameters: dict[str, Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def published(matrix: Matrix) -> Matrix:
    """Apply the Newton-Schulz iteration of Jordan (2024) five times: X <- a X + (b A + c A^2) X with A = X X^T."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / np.sqrt((wide**2).sum())
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


@pytest.mark.parametrize("shape", [(12, 12), (36, 12), (12, 48), (1, 5), (7, 1)])
def test_orthogonalization_matches_the_publication(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    orthogonal = orthogonalize(matrix)
    assert np.abs(orthogonal.numpy() - published(matrix.numpy())).max() < 1e-13
    values = torch.linalg.svdvals(orthogonal)
    assert values.min() > 0.4 and values.max() < 1.3
    assert (orthogonalize(matrix.bfloat16()).double() - orthogonal).abs().max() < 0.05
    assert torch.equal(orthogonalize(torch.zeros(shape)), torch.zeros(shape))


def test_the_update_matches_the_publication() -> None:
    parameters, muon_optimizer = make(SPLIT, torch.float64, compute_type=torch.float64)
    muon_optimizer.found_inf = torch.tensor(0.0)  # a flag on the device, as in training
    weights = {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}
    momenta = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(4):
        give_gradients(parameters, step)
        muon_optimizer.step()
        for name, parameter in parameters.items():
            gradient = parameter.grad.numpy()
            momenta[name] = 0.95 * momenta[name] + 0.05 * gradient
            ahead = 0.95 * momenta[name] + 0.05 * gradient  # Nesterov
            weights[name] *= 1 - 0.02 * 0.1
            for part in np.split(np.arange(len(ahead)), 3 if "qkv" in name else 1):
                size = 0.2 * math.sqrt(max(len(part), ahead.shape[1]))
                weights[name][part] -= 0.02 * size * published(ahead[part])
    for name, parameter in parameters.items():
        assert np.abs(parameter.detach().numpy() - weights[name]).max() < 1e-12, name


def test_unsplit_muon_has_the_same_bits_as_torchs() -> None:
    parameters, muon_optimizer = make(PLAIN)
    muon_optimizer.found_inf = torch.tensor(0.0)  # torch's optimizer has no such flag
    torch_parameters = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    torch_optimizer = torch.optim.Muon(
        list(torch_parameters.values()), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(5):
        for parameter_set in (parameters, torch_parameters):
            give_gradients(parameter_set, step)
        muon_optimizer.step()
        torch_optimizer.step()
        for name, parameter in parameters.items():
            assert torch.equal(parameter, torch_parameters[name]), (step, name)
    muon_optimizer.found_inf = torch.tensor(1.0)
    momenta = {
        name: muon_optimizer.state[parameter]["momentum_buffer"].clone() for name, parameter in parameters.items()
    }
    for parameter in parameters.values():
        parameter.grad.fill_(float("nan"))
    muon_optimizer.step()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, torch_parameters[name])
        assert torch.equal(muon_optimizer.state[parameter]["momentum_buffer"], momenta[name])


def test_queries_keys_and_values_are_split_by_rows() -> None:
    fused, _, up, _ = NAMES
    for heads, rows in ((3, [range(12), range(12, 24), range(24, 36)]), (1, [range(12), range(12, 16), range(16, 20)])):
        axes = axes_of(fused, attrs.evolve(CONFIG, n_kv_heads=heads))
        split, unsplit = (matrices_of(fused, axes, ON_ONE_RANK, split=split) for split in (True, False))
        assert [piece.local_rows for part in split for [piece] in part.pieces] == rows
        assert [piece.local_rows for part in unsplit for [piece] in part.pieces] == [range(axes.shape[0])]
    assert len(matrices_of(up, AXES[up], ON_ONE_RANK, split=True)) == 1


def test_momentum_warms_up_linearly() -> None:
    options = OptimizationOptions(optimizer="muon", muon_momentum_warmup_steps=300)
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    optimizer = Optimizer(parameters, AXES, options, CPU)
    [part] = optimizer.parts
    for step, momentum in ((0, 0.85), (150, 0.90), (299, 0.9497), (300, 0.95), (10_000, 0.95)):
        optimizer.set_step(step, 0.02)
        assert [group["momentum"] for group in part.param_groups] == [pytest.approx(momentum, abs=4e-5)], step
    default_optimizer = Optimizer(parameters, AXES, OptimizationOptions(optimizer="muon"), CPU)
    default_optimizer.set_step(0, 0.02)
    assert [group["momentum"] for group in default_optimizer.parts[0].param_groups] == [0.95]


def test_flops_match_torchs_count() -> None:
    for name, shape in SHAPES.items():
        [matrix] = matrices_of(name, AXES[name], ON_ONE_RANK, split=False)
        with FlopCounterMode(display=False) as counter:
            orthogonalize(torch.randn(shape))
        assert counter.get_total_flops() == orthogonalization_flops(matrix), name


@pytest.mark.parametrize(
    ("size", "split_qkv", "largest_share"), [("124M", True, 1.0), ("124M", False, 1.05), ("1.5B", True, 1.0)]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_eight_ranks_compute_an_eighth_each(
    monkeypatch: pytest.MonkeyPatch, size: str, split_qkv: bool, largest_share: float, sharded: bool
) -> None:
    computed: list[torch.Size] = []

    def record(matrix: torch.Tensor) -> torch.Tensor:
        computed.append(matrix.shape)
        return matrix

    monkeypatch.setattr(muon, "orthogonalize", record)
    monkeypatch.setattr(matrix_shares, "all_gather_single", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *_, **__: None)
    axes = {name: axes_of(name, GPT2_SIZES[size]) for name, _ in meta_network(GPT2_SIZES[size]).named_parameters()}
    axes = {name: matrix_axes for name, matrix_axes in axes.items() if rate_group(matrix_axes) == "matrix"}

    def flops(ranks: RankGroup) -> int:
        """Return the FLOPs of the orthogonalizations that a rank computes in a step."""
        computed.clear()
        step_on(ranks, axes, SPLIT if split_qkv else PLAIN, sharded=sharded)
        sides = [sorted(shape) for shape in computed]
        return sum(5 * (4 * short * short * long + 2 * short**3) for short, long in sides)

    total_flops, rank_flops = flops(ALONE), [flops(RankGroup(rank=rank, size=8)) for rank in range(8)]
    assert sum(rank_flops) == total_flops
    assert max(rank_flops) <= largest_share * total_flops / 8


def step_on(ranks: RankGroup, axes: dict[str, Axes], options: OptimizationOptions, *, sharded: bool) -> None:
    """Take a step on one rank, with meta tensors, which need no memory."""
    meta = torch.device("meta")
    local_parameters = {}
    for name, (rows, columns) in ((name, parameter_axes.shape) for name, parameter_axes in axes.items()):
        row_count = max(0, min(ranks.chunk(rows), rows - ranks.first_row(rows))) if sharded else rows
        local_parameters[name] = torch.nn.Parameter(torch.empty(row_count, columns, device=meta))
    spread = Spread(ranks=ranks, row_shards=ranks.size if sharded else 1)
    placement = Placement(device=meta, make_spread=lambda: spread, axes=axes)
    muon_optimizer = Muon(local_parameters, options, placement)
    for parameter in local_parameters.values():
        parameter.grad = torch.empty_like(parameter)
        muon_optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter)
    muon_optimizer.step()
