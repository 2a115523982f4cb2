"""Table of an estimate: measured machines first, bounds marked as bounds, then the assumptions behind the numbers."""

from tabulate import tabulate

from common.errors import printable
from training.config.batch_plan import describe
from training.planning.estimate import Offer, RunEstimate
from training.planning.memory_model import CALIBRATION, GIB, gpu_bytes
from training.planning.price_list import shown
from training.planning.throughput import ENTERED, OURS, SIMILAR, Throughput, bound, measurements

ANOTHER_TRAINER = "measured, another trainer"
_HEADS = ["machine", "$/hour", "batch", "largest", "GiB", "tokens/s", "hours", "$", "source of tokens/s", ""]
_COLUMNS = ("left", *["right"] * 7, "left", "left")


def describe_estimate(estimate: RunEstimate) -> list[str]:
    """Return the run's arithmetic, the table and its notes, as lines."""
    possible = [offer for offer in estimate.offers if offer.plan is not None]
    compared = [offer for offer in possible if offer.throughput.measured] or possible
    cheapest, fastest = min(compared, key=estimate.offer_usd), min(compared, key=estimate.offer_hours)
    rows = []
    for offer in sorted(estimate.offers, key=lambda offer: not offer.throughput.measured):
        marks = [word for word, best in (("cheapest", cheapest), ("fastest", fastest)) if best is offer]
        rows.append([*_machine(estimate, offer), *_speed(estimate, offer, offer.throughput), ", ".join(marks)])
        rows += [[*[""] * 5, *_speed(estimate, offer, row), ""] for row in _others(estimate, offer)]
    return [
        *_arithmetic(estimate, possible),
        "",
        *tabulate(rows, _HEADS, disable_numparse=True, colalign=_COLUMNS).splitlines(),
        "",
        *_basis(estimate, compared, cheapest),
        *_notes(estimate),
        *_exceptions(estimate, possible),
        *_changes(estimate),
    ]


def _arithmetic(estimate: RunEstimate, possible: list[Offer]) -> list[str]:
    """Return the arithmetic of the first machine that can do the run, named where the others' differ."""
    plans = [offer.plan for offer in possible if offer.plan is not None]
    lines = describe(estimate.run.model, estimate.run.train, plans[0])
    if any(plan.layout != plans[0].layout for plan in plans):
        lines.insert(0, f"machine      {possible[0].machine.name}; the other machines' batches are in the table")
    return lines


def _machine(estimate: RunEstimate, offer: Offer) -> list[str]:
    """Return the cells up to memory."""
    batch = ""
    if offer.plan is not None:
        layout = offer.plan.layout
        batch = f"{layout.microbatch_size} x {layout.accumulation} x {layout.data_parallel_size}"
    return [
        printable(offer.machine.name),
        f"{offer.machine.usd_per_hour:,.2f}",
        batch,
        f"{offer.largest or 'none'}",
        f"{offer.bytes / GIB:.1f} of {gpu_bytes(offer.machine.gpu) / GIB:.1f}",
    ]


def _speed(estimate: RunEstimate, offer: Offer, throughput: Throughput) -> list[str]:
    """Return the cells from tokens/s on; a bound is at most so fast, and so the run takes at least so long."""
    if offer.plan is None:
        return ["", "", "", "no, see below"]
    most, least = ("", "") if throughput.measured else ("<= ", ">= ")
    hours = estimate.hours(offer.plan, throughput.tokens_per_second)
    return [
        f"{most}{throughput.tokens_per_second:,.0f}",
        f"{least}{hours:.2f}",
        f"{least}{hours * offer.machine.usd_per_hour:,.2f}",
        _source(throughput),
    ]


def _source(throughput: Throughput) -> str:
    if not throughput.measured or throughput.source == ENTERED:
        return throughput.source
    return f"measured, {OURS}" if throughput.source == OURS else ANOTHER_TRAINER


def _others(estimate: RunEstimate, offer: Offer) -> list[Throughput]:
    """Return further tokens/s of a machine: other trainers' measurements, and the bound beside the first."""
    if offer.plan is None:
        return []
    used, model = offer.throughput, estimate.run.model
    rows = [row for row in measurements(model, offer.machine) if row.source != OURS and row != used]
    return [*rows, bound(model, offer.machine)] if _source(used) == ANOTHER_TRAINER else rows


def _basis(estimate: RunEstimate, compared: list[Offer], cheapest: Offer) -> list[str]:
    """Return what "cheapest" and "fastest" compare, and a machine that another basis would prefer."""
    possible = [offer for offer in estimate.offers if offer.plan is not None]
    if cheapest.throughput.measured:
        sources = ", ".join(sorted({_source(offer.throughput) for offer in compared}))
        lines = [f"cheapest, fastest: of the machines with known tokens/s ({sources})"]
        bounds = [offer for offer in possible if not offer.throughput.measured]
        lowest = min(bounds, key=estimate.offer_usd, default=cheapest)
        if estimate.offer_usd(lowest) < estimate.offer_usd(cheapest):
            price = f"${estimate.offer_usd(lowest):,.2f}"
            lines.append(f"not measured, cheaper only if it reached its bound: {lowest.machine.name}, {price}")
        return lines
    lines = ["cheapest, fastest: by bounds alone; nobody has measured a network of this shape on these machines"]
    fitted = [offer for offer in possible if offer.throughput.source != SIMILAR]
    if fitted and cheapest not in fitted:
        best = min(fitted, key=estimate.offer_usd)
        lines.append(
            f"cheapest: {cheapest.machine.name}, by a roofline that is not fitted to its GPU; of the others "
            f"{best.machine.name}, ${estimate.offer_usd(best):,.2f}"
        )
    return lines


def _notes(estimate: RunEstimate) -> list[str]:
    """Return the meaning of the columns and the assumptions behind them."""
    prices, start_up, batch = estimate.prices, estimate.start_up, estimate.run.train.batch
    measured = f"measured, median of this run's {start_up.jobs} earlier jobs" if start_up.jobs else "an assumption"
    lines = [
        f"prices of {prices.date}: {shown(prices.path)}; the machine's time before and after the run is not included",
        f"hours: training, validation, and {start_up.seconds:.0f} s of start-up ({measured})",
        "batch: micro-batch x accumulation x GPUs; largest: the largest micro-batch that fits",
        f"GiB: of each GPU, at micro-batch {batch.microbatch_size}; {CALIBRATION}",
    ]
    if batch.global_batch_size is None and len({offer.machine.gpus for offer in estimate.offers}) > 1:
        lines.append("no global_batch_size: the batch and the number of steps depend on the machine")
    rows = [row for offer in estimate.offers for row in (offer.throughput, *_others(estimate, offer))]
    if any(not row.measured for row in rows):
        lines.append(
            "bound (<=, >=): no measurement of Lockstep: a roofline fitted to llm.c, the fastest published trainer of "
            "GPT-2, on 8 x A100 and H100 with micro-batches that fill the GPU; expect less"
        )
    if others := sorted({row.source for row in rows if _source(row) == ANOTHER_TRAINER}):
        lines.append(
            f"another trainer: measured by its author, for a network of this shape, not with Lockstep: "
            f"{', '.join(others)}"
        )
    return lines


def _exceptions(estimate: RunEstimate, possible: list[Offer]) -> list[str]:
    """Return settings of the run that the numbers leave out."""
    train, lines = estimate.run.train, []
    if train.execution.precision not in ("auto", "bf16") or train.execution.compile is False:
        lines.append("GiB, tokens/s: for bf16, compiled; this run is not: it takes more memory and time")
    slower = {
        "recompute_blocks": train.memory.recompute_blocks,
        "loss_chunks": train.memory.loss_chunks > 1,
        'parallel "fsdp"': train.execution.parallel == "fsdp",
    }
    options = [option for option, given in slower.items() if given]
    if options and any(not offer.throughput.measured for offer in possible):
        lines.append(f"bounds leave out the cost of {' and '.join(options)}")
    return lines


def _changes(estimate: RunEstimate) -> list[str]:
    """Return the machines that need another micro-batch, and those that cannot do the run, with the reason."""
    batch, lines = estimate.run.train.batch, []
    for offer in estimate.offers:
        name, gpus = offer.machine.name, offer.machine.gpus
        if offer.plan is None:
            lines.append(f"{name}: {offer.problem}")
        elif (size := offer.plan.layout.microbatch_size) != batch.microbatch_size:
            own = batch.microbatch_size
            why = f"{gpus} GPUs make no batch of {batch.global_batch_size} with micro-batches of {own}"
            why = why if offer.fits else f"{own} does not fit"
            lines.append(f"{name}: {why}; start with --set microbatch_size={size}")
    return lines
