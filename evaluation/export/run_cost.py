"""What a checkpoint took to train: tokens, hours, dollars."""

from typing import Any

import attrs

from training.state import Position


@attrs.frozen(kw_only=True)
class RunCost:
    """Of a run up to one of its checkpoints."""

    tokens: int
    hours: float  # wall clock
    dollars: float | None  # None where the run was not told the machine's price


def cost_of(position: Position, record: dict[str, Any]) -> RunCost:
    """Return the cost up to a checkpoint from its position and the run's `resolved.json`, which may be empty."""
    hours, price = position.elapsed_seconds / 3600, record.get("price_per_hour")
    return RunCost(tokens=position.tokens, hours=hours, dollars=None if price is None else price * hours)
