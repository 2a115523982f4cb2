"""Plan of a ladder, before it trains: its runs, their tokens, its share of the target's FLOPs, hours and dollars."""

from collections.abc import Sequence

from experiments.ladder.conclusion import price_target
from experiments.ladder.forecast import target_tokens
from experiments.ladder.size_rules import rounded_rate, scaled_rate
from experiments.ladder.trunk import Trunk, TrunkMaker
from experiments.shared.experiment_files import counted
from experiments.shared.run_progress import measured_speed, time_and_cost
from model.config import flops_per_token


def size_trunks(maker: TrunkMaker, best: float) -> list[Trunk]:
    """Return the trunks of all sizes and seeds, given the best rate of the smallest size."""
    smallest, *larger = maker.ladder.sizes
    found = maker.seeds(smallest, best)
    for size in larger:
        found += maker.seeds(size, scaled_rate(best, size.parameters, smallest.parameters))
    return found


def describe_plan(maker: TrunkMaker, usd_per_hour: float | None) -> list[str]:
    """Return the plan as lines; `usd_per_hour`: of this machine.

    Raises BadInput for runs that could not be trained, and a target too large to price.
    """
    ladder = maker.ladder
    seeds = len(ladder.seeds)
    tried = [maker.seeds(ladder.sizes[0], rounded_rate(rate))[0] for rate in ladder.rates]
    trunks = size_trunks(maker, ladder.rates[len(ladder.rates) // 2])[::seeds]
    lines = [_line(trunk, trunk.directory.name, len(trunk.horizons) - 1) for trunk in tried]
    for trunk in trunks:
        lines += [
            _line(trunk, f"{trunk.size.name}, {ratio:g} tokens per parameter", index)
            for index, ratio in enumerate(ladder.tokens_per_parameter)
        ]
    flops = sum(trunk.flops(branches=False) for trunk in tried)
    flops += sum(trunk.flops(branches=True) for trunk in trunks) - trunks[0].flops(branches=False)
    flops *= seeds
    priced = price_target(ladder)  # a target too big for every machine is refused before anything is trained
    whole = flops_per_token(ladder.target.model) * target_tokens(ladder.target)
    return [
        *lines,
        f"{len(tried)} rates at {trunks[0].size.name}, more while the best one lies at the edge; then {len(trunks)} "
        f"sizes x {len(ladder.tokens_per_parameter)} horizons, each size one trunk"
        + (f"; all of it with {seeds} seeds" if seeds > 1 else "")
        + f": {flops:.3g} FLOPs, "
        f"{flops / whole:.2g} x the target's {whole:.3g}",
        _cost([*tried, *trunks], flops, usd_per_hour),
        *([f"the target is {priced}"] if isinstance(priced, str) else []),
    ]


def _cost(trunks: Sequence[Trunk], flops: float, usd_per_hour: float | None) -> str:
    """Return hours and dollars at the speed of the ladder's runs that have ended."""
    measured = [
        speed * flops_per_token(trunk.size.model)
        for trunk in {trunk.directory: trunk for trunk in trunks}.values()
        if (speed := measured_speed(trunk.directory)) is not None
    ]
    if not measured:
        return "time and cost: not known before a run of this ladder has ended: no estimate holds for small networks"
    total, runs = time_and_cost(flops, measured, usd_per_hour), counted(len(measured), "earlier run")
    return f"{total} one run after the other, at the FLOP/s of {runs}; small sizes reach less than large"


def _line(trunk: Trunk, name: str, index: int) -> str:
    plan = trunk.horizons[index].plan
    return (
        f"{name}: N {trunk.size.parameters:,}, {plan.steps:,} steps of {trunk.batch.global_batch_size} sequences, "
        f"{plan.train_tokens:,} tokens"
    )
