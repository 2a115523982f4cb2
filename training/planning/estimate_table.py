"""Offers as lines for people: a table, the cheapest and the fastest marked, and what its numbers rest on."""

from tabulate import tabulate

from common.errors import printable
from training.config.batch_plan import Plan, describe
from training.config.train_config import Run
from training.planning.estimate import START_UP_SECONDS, Offer, run_seconds
from training.planning.memory_model import CALIBRATION, GIB, gpu_bytes
from training.planning.price_list import Machine, PriceList
from training.planning.throughput import ENTERED, OURS, SIMILAR, Throughput, bound, measurements


def describe_offers(run: Run, prices: PriceList, offers: list[Offer]) -> list[str]:
    """Return the run's arithmetic, the offers, and notes; at least one of them is possible."""
    possible = [offer for offer in offers if offer.plan is not None]
    compared = _compared(possible)
    cheapest = min(compared, key=lambda offer: _usd(run, offer))
    fastest = min(compared, key=lambda offer: _hours(run, offer))
    rows = []
    for offer in offers:
        marks = [word for word, best in (("cheapest", cheapest), ("fastest", fastest)) if best is offer]
        rows.append([*_cells(run, offer), ", ".join(marks)])
        if offer.plan is not None:
            rows += [_other(run, offer.plan, offer.machine, row) for row in _others(run, offer)]
    heads = ["machine", "$/hour", "batch", "largest", "GiB", "tokens/s", "hours", "$", "throughput", ""]
    columns = ("left", *["right"] * 7, "left", "left")
    return [
        *_arithmetic(run, possible),
        "",
        *tabulate(rows, heads, disable_numparse=True, colalign=columns).splitlines(),
        "",
        *_notes(run, prices, offers),
        *_marks(run, possible, cheapest),
        *_doubts(run, possible),
        *_changes(run, offers),
    ]


def _compared(possible: list[Offer]) -> list[Offer]:
    """Return the offers among which one is the cheapest: those that somebody has measured, or all."""
    return [offer for offer in possible if offer.throughput.measured] or possible


def _arithmetic(run: Run, possible: list[Offer]) -> list[str]:
    """Return the arithmetic of the first machine that can do the run, named where the others' differ."""
    plans = [offer.plan for offer in possible if offer.plan is not None]
    lines = describe(run, plans[0])
    if any(plan.layout != plans[0].layout for plan in plans):
        lines.insert(0, f"machine      {possible[0].machine.name}; the other machines' batches are in the table")
    return lines


def _hours(run: Run, offer: Offer) -> float:
    assert offer.plan is not None
    return run_seconds(run, offer.plan, offer.throughput.tokens_per_second) / 3600


def _usd(run: Run, offer: Offer) -> float:
    return _hours(run, offer) * offer.machine.usd_per_hour


def _cells(run: Run, offer: Offer) -> list[str]:
    machine, plan = offer.machine, offer.plan
    memory = f"{offer.bytes / GIB:.1f} of {gpu_bytes(machine.gpu) / GIB:.1f}"
    start = [printable(machine.name), f"{machine.usd_per_hour:,.2f}"]
    if plan is None:
        return [*start, "", f"{offer.largest or 'none'}", memory, "", "", "", "no, see below"]
    layout = plan.layout
    return [
        *start,
        f"{layout.microbatch_size} x {layout.accumulation} x {layout.world_size}",
        f"{offer.largest}",
        memory,
        f"{offer.throughput.tokens_per_second:,.0f}",
        f"{_hours(run, offer):.2f}",
        f"{_usd(run, offer):,.2f}",
        _kind(offer.throughput),
    ]


def _kind(row: Throughput) -> str:
    """Return the word of the table for where tokens/s are from."""
    return "another trainer" if row.measured and row.source not in (ENTERED, OURS) else row.source


def _others(run: Run, offer: Offer) -> list[Throughput]:
    """Return what else is known of the machine: other trainers' measurements, and the roofline beside the first."""
    used, others = offer.throughput, [row for row in measurements(run.model, offer.machine) if row.source != OURS]
    rows = [row for row in others if row != used]
    return [*rows, bound(run.model, offer.machine)] if _kind(used) == "another trainer" else rows


def _other(run: Run, plan: Plan, machine: Machine, row: Throughput) -> list[str]:
    """Return the line of other tokens/s, for the same tokens on the same machine."""
    hours = run_seconds(run, plan, row.tokens_per_second) / 3600
    cost = f"{hours * machine.usd_per_hour:,.2f}"
    return [*[""] * 5, f"{row.tokens_per_second:,.0f}", f"{hours:.2f}", cost, _kind(row), ""]


def _notes(run: Run, prices: PriceList, offers: list[Offer]) -> list[str]:
    """Return what the columns mean."""
    lines = [
        f"prices of {prices.date}: {prices.path}; what a machine costs before and after the run is not in here",
        f"hours: training, validation, and {START_UP_SECONDS:.0f} s of start-up (a guess)",
        "batch: micro-batch x accumulation x GPUs; largest: the largest micro-batch that fits",
        f"GiB: of each GPU, at micro-batch {run.train.batch.microbatch_size}; {CALIBRATION}",
    ]
    if run.train.batch.global_batch_size is None and len({offer.machine.gpus for offer in offers}) > 1:
        lines.append("no global_batch_size: the batch and the number of steps depend on the machine")
    rows = [row for offer in offers for row in (offer.throughput, *_others(run, offer))]
    if any(not row.measured for row in rows):
        lines.append(
            "roofline: a bound, not measured: what llm.c, the fastest published trainer of GPT-2, reaches with "
            "micro-batches that fill the GPU; fitted on 8 x A100 and H100"
        )
    if others := sorted({row.source for row in rows if _kind(row) == "another trainer"}):
        lines.append(f"another trainer: measured by its author, for a network of this shape: {', '.join(others)}")
    return lines


def _marks(run: Run, possible: list[Offer], cheapest: Offer) -> list[str]:
    """Return what "cheapest" and "fastest" were named by, and a cheaper machine that rests on less or more."""
    if not cheapest.throughput.measured:
        lines = ["cheapest, fastest: by the roofline; no machine has been measured with a network of this shape"]
        others = [offer for offer in possible if offer.throughput.source != SIMILAR]
        if others and cheapest not in others:
            best = min(others, key=lambda offer: _usd(run, offer))
            lines.append(
                f"cheapest: {cheapest.machine.name}, by a roofline that is not fitted to its GPU; of the others "
                f"{best.machine.name}, ${_usd(run, best):,.2f}"
            )
        return lines
    kinds = sorted({_kind(offer.throughput) for offer in _compared(possible)})
    lines = [f"cheapest, fastest: of the machines that were measured ({', '.join(kinds)})"]
    bounds = [offer for offer in possible if not offer.throughput.measured]
    lowest = min(bounds, key=lambda offer: _usd(run, offer), default=cheapest)
    if _usd(run, lowest) < _usd(run, cheapest):
        lines.append(
            f"not measured, and cheaper if it reached its bound: {lowest.machine.name}, ${_usd(run, lowest):,.2f}"
        )
    return lines


def _doubts(run: Run, possible: list[Offer]) -> list[str]:
    """Return where the numbers rest on less than they seem to."""
    train, lines = run.train, []
    if train.execution.precision not in ("auto", "bf16") or train.execution.compile is False:
        lines.append("GiB, tokens/s: of bf16, compiled, which this run is not: it takes more memory and time")
    slower = {
        "recompute_blocks": train.memory.recompute_blocks,
        "loss_chunks": train.memory.loss_chunks > 1,
        'parallel "fsdp"': train.execution.parallel == "fsdp",
    }
    options = [option for option, given in slower.items() if given]
    if options and any(not offer.throughput.measured for offer in possible):
        lines.append(f"tokens/s by roofline: what {' and '.join(options)} cost is not counted")
    return lines


def _changes(run: Run, offers: list[Offer]) -> list[str]:
    """Return which machines need another micro-batch, and why, and what keeps the run from the rest."""
    size, batch, lines = run.train.batch.microbatch_size, run.train.batch.global_batch_size, []
    for offer in offers:
        name, gpus = offer.machine.name, offer.machine.gpus
        if offer.plan is None:
            lines.append(f"{name}: {offer.problem}")
        elif offer.plan.layout.microbatch_size != size:
            why = f"{gpus} GPUs make no batch of {batch} with micro-batches of {size}" if offer.fits else ""
            why = why or f"{size} does not fit"
            lines.append(f"{name}: {why}; start with --set microbatch_size={offer.plan.layout.microbatch_size}")
    return lines
