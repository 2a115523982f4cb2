"""Tensor shards: the plain network's loss and gradients, cuts that cover each parameter, dropout by shard, refusals."""

import torch

from model.axes import ShardCut


def part_of(whole: torch.Tensor, cut: ShardCut) -> torch.Tensor:
    """Return a shard's part of a parameter."""
    rows = torch.cat([whole[run.rows.start : run.rows.stop] for run in cut.rows])
    return rows if cut.columns is None else rows[:, cut.columns.start : cut.columns.stop]
