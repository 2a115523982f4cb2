"""Muon (Jordan 2024) for the matrices of the blocks, and AdamW for all other parameters.

Muon makes a matrix's momentum nearly orthogonal with five Newton-Schulz steps in bf16. Its updates are scaled to the
size of AdamW's updates (Liu et al., arXiv 2502.16982), so that both optimizers can use the same learning rate and
weight decay. For the Newton-Schulz steps, the matrices are divided among ranks (training/parallel/matrix_shares.py).
Each rank then updates the momentum and the weights that it holds.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from model.axes import Axes, plain_name
from training.config.key_groups import OptimizationOptions
from training.optimizers.adamw import ADAMW_RULE
from training.optimizers.update_rule import Placement, UpdateRule, parameter_groups, rate_group
from training.parallel.matrix_shares import Matrix, compute_replicated, compute_sharded, make_rounds
from training.parallel.mesh import HeldPiece, Spread

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic with the steepest slope at zero (Jordan 2024)
NEWTON_SCHULZ_STEPS = 5
SMALLEST_NORM = 1e-7
ADAMW_UPDATE_SIZE = 0.2  # root mean square of AdamW's updates, divided by the learning rate (arXiv 2502.16982)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix (m, n) with the singular vectors of the given matrix, and with singular values near 1.

    The computation uses the precision of the given matrix.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix  # the smaller dimension comes first
    wide = wide / wide.norm().clamp(min=SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


def orthogonalization_flops(matrix: Matrix) -> int:
    short, long = sorted((matrix.rows, matrix.columns))
    return NEWTON_SCHULZ_STEPS * (4 * short * short * long + 2 * short**3)


def matrices_of(name: str, axes: Axes, spread: Spread, *, split: bool) -> list[Matrix]:
    """Return the matrices of a parameter.

    With `split`, a fused parameter counts as several matrices, such as queries, keys and values.
    """
    rows, columns = axes.shape
    heights = [axis.size for axis in axes.rows] if split else [rows]
    parts = [range(end - height, end) for height, end in zip(heights, accumulate(heights), strict=True)]
    return [Matrix(rows=len(part), columns=columns, pieces=spread.pieces(name, axes, part)) for part in parts]


class Muon(torch.optim.Optimizer):
    """Muon for this rank's rows of each parameter.

    If queries, keys and values are not split, the results have the same bits as those of torch.optim.Muon.
    """

    found_inf: Tensor | None = None  # on a GPU, a scalar on the device; 1.0 prevents the update

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        options: OptimizationOptions,
        placement: Placement,
        compute_type: torch.dtype = torch.bfloat16,
    ):
        defaults = {
            "lr": options.learning_rate,
            "momentum": options.muon_momentum,
            "fused": placement.device.type == "cuda",  # tells training/optimizer.py that `found_inf` is supported
        }
        super().__init__(parameter_groups(parameters, options, placement.axes), defaults)
        names = {parameter: name for name, parameter in parameters.items()}
        self._compute_type, self._spread, self._parameters = compute_type, placement.spread, parameters
        self._group = {names[parameter]: group for group in self.param_groups for parameter in group["params"]}
        plain_axes = {plain_name(name): placement.axes[name] for name in parameters}
        matrices = [
            matrix
            for name, axes in plain_axes.items()
            for matrix in matrices_of(name, axes, self._spread, split=options.muon_split_qkv)
        ]
        self._rounds = make_rounds(matrices, orthogonalization_flops, self._spread.ranks.size)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients. Call it on every rank."""
        update_blocked = None if self.found_inf is None else self.found_inf.bool()
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None
            with _updated(self.state[parameter]["momentum_buffer"], update_blocked) as momentum:
                momentum.lerp_(parameter.grad, 1 - self._group[name]["momentum"])
        compute = compute_sharded if self._spread.sharded else compute_replicated
        for matrices in self._rounds:
            for matrix, piece, direction in compute(matrices, self._spread.ranks, orthogonalize, self._direction):
                group = self._group[piece.parameter]
                scale = group["lr"] * (ADAMW_UPDATE_SIZE * math.sqrt(max(matrix.rows, matrix.columns)))
                with _updated(_rows(piece, self._parameters[piece.parameter]), update_blocked) as weights:
                    weights.mul_(1 - group["lr"] * group["weight_decay"])
                    weights.add_(direction, alpha=-scale)

    def _direction(self, piece: HeldPiece) -> Tensor:
        """Return a piece of Nesterov's look-ahead, which is a weighted mean of the gradient and the momentum."""
        parameter = self._parameters[piece.parameter]
        assert parameter.grad is not None
        gradient = _rows(piece, parameter.grad)
        momentum = _rows(piece, self.state[parameter]["momentum_buffer"])
        return gradient.lerp(momentum, self._group[piece.parameter]["momentum"]).to(self._compute_type)


def _rows(piece: HeldPiece, local: Tensor) -> Tensor:
    return local[piece.local_rows.start : piece.local_rows.stop]


@contextmanager
def _updated(tensor: Tensor, update_blocked: Tensor | None) -> Iterator[Tensor]:
    """Yield a tensor for the `with` block to change in place.

    With `update_blocked`, a switch on the device, the `with` block changes a copy instead. Afterwards, the copy is
    written to the tensor unless the switch is true. The host never has to read the switch.
    """
    if update_blocked is None:
        yield tensor
        return
    updated = tensor.clone()
    yield updated
    torch.where(update_blocked, tensor, updated, out=tensor)


def _settings(options: OptimizationOptions, step: int) -> dict[str, float]:
    """Return the momentum for a step. During the warm-up, the momentum changes linearly to its final value."""
    first, last, warmup_steps = options.first_momentum, options.muon_momentum, options.muon_momentum_warmup_steps
    return {"momentum": last if step >= warmup_steps else first + (last - first) * step / warmup_steps}


RULES = (
    attrs.evolve(ADAMW_RULE, takes=lambda axes: rate_group(axes) != "matrix"),
    UpdateRule(
        takes=lambda axes: rate_group(axes) == "matrix",
        state={"momentum_buffer": torch.float32},
        build=Muon,
        settings=_settings,
    ),
)
