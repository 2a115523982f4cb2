"""Muon (Jordan 2024) for the matrices of the blocks, AdamW for all other parameters.

Muon makes a matrix's momentum nearly orthogonal by five Newton-Schulz steps in bf16. Its update is scaled to the size
of AdamW's (Liu et al., arXiv 2502.16982), so that one learning rate and one weight decay serve both.
"""

import attrs
import torch
from torch import nn

from training.optimizers.adamw import ADAMW_RULE
from training.optimizers.update_rule import (
    HyperParameters,
    OptimizerKind,
    Shape,
    StateTensor,
    UpdateRule,
    parameter_groups,
    rate_group,
)


def _is_block_matrix(name: str, shape: Shape) -> bool:
    return rate_group(name, shape) == "matrix"


def _momentum(shape: Shape) -> dict[str, StateTensor]:
    return {"momentum_buffer": StateTensor(shape)}


def _build(parameters: dict[str, nn.Parameter], hyper: HyperParameters, _: torch.device) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        parameter_groups(parameters, hyper),
        lr=hyper.learning_rate,
        adjust_lr_fn="match_rms_adamw",
    )


MUON = OptimizerKind(
    title="Muon for the matrices of the blocks, AdamW for all else",
    rules=(
        attrs.evolve(ADAMW_RULE, takes=lambda name, shape: not _is_block_matrix(name, shape)),
        UpdateRule(takes=_is_block_matrix, state=_momentum, build=_build),
    ),
    needs_whole_parameters=True,
)
