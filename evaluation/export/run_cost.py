"""What a checkpoint took to train: tokens, hours, dollars."""

from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class RunCost:
    """Of a run up to one of its checkpoints."""

    tokens: int
    hours: float  # wall clock
    dollars: float | None  # None where the run was not told the machine's price


def cost_of(state: dict[str, Any], record: dict[str, Any]) -> RunCost:
    """Return the cost from a checkpoint's `state.json` and the run's `resolved.json`, which may be empty."""
    hours, price = state["elapsed_seconds"] / 3600, record.get("price_per_hour")
    return RunCost(tokens=state["tokens"], hours=hours, dollars=None if price is None else price * hours)
