"""The table of --plan: the memory, hours and dollars of a run on rented machines, and the assumptions behind it.

Machines whose GPUs match the run directory's name come first, then machines with the same number of other GPUs, and
then all others. In each of these groups, the cheapest come first.
"""

import re
import textwrap
from collections.abc import Iterable

from tabulate import tabulate

from common.text import counted, printable, rough_number, time_cost
from model.config import shard_counts
from training.config.batch_plan import VALIDATION_SHARE, describe
from training.planning.estimate import Offer, RunEstimate
from training.planning.memory_model import CALIBRATION, GIB, NODE_GPUS
from training.planning.price_list import shown
from training.planning.throughput import ESTIMATE, EXCHANGES, MEASURED, OTHERS, ROUGH, SIMULATION, Throughput

_HEADINGS = ["machine", "$/hour", "tokens/s", "hours", "$", "kind"]
_COLUMNS = ("left", *["right"] * 4, "left")
WIDTH = 80  # columns of a terminal
_UNKNOWN = (
    "tokens/s of such a small network must be measured: train.py RUN --max-steps 100 measures them on this machine, "
    "and the table then starts with a row for this job; with --price-per-hour, the row also shows the cost"
)
ESTIMATE_CAUTION = (
    "estimate: a roofline of the bytes that Lockstep's kernels move, with matrix products and attention as fast as in "
    "llm.c on 8 x A100 and H100, and with micro-batches that fill the GPU; it ignores the cost of recompute_blocks, "
    "loss_chunks, FSDP's gathers, the smaller products of tensor shards and, without --nodes, the exchange of "
    "gradients between GPUs; expect fewer tokens/s"
)


def wrapped(lines: Iterable[str]) -> list[str]:
    """Wrap lines to the width of a terminal. Continuation lines are indented like the text after a label."""
    wrapped_lines = []
    for line in lines:
        label = re.match(r"[a-z]* {2,}", line)
        indent = " " * (len(label[0]) if label else 2)
        wrapped_lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [line]
    return wrapped_lines


def describe_estimate(estimate: RunEstimate) -> list[str]:
    """Return the output of --plan: the arithmetic of the run, the table of machines, and notes on the assumptions."""
    possible = [offer for offer in estimate.offers if offer.plan is not None]
    ranks = estimate.run.train.execution.tensor_parallel
    plan = estimate.named_plan
    machine = f"{ranks} process{'es' * (ranks > 1)}; the directory's name does not state the number of GPUs"
    if plan is None:
        plan, machine = possible[0].plan, possible[0].machine.name
    elif (gpus := estimate.requested_gpus) is not None:
        machine = f"{counted(gpus, 'GPU')}, as in the directory's name"
    assert plan is not None
    priced = [offer for offer in possible if offer.throughputs]  # hours and dollars can be calculated only for these
    rows = []
    if estimate.last_job is not None:
        speed, hours, price = estimate.last_job
        rows.append(_row("its last job", price, [hours], [Throughput(speed, MEASURED)]))
    for offer in priced:
        hours_by_speed = [offer.hours(speed.tokens_per_second) for speed in reversed(offer.throughputs)]
        rows.append(_row(offer.machine.name, offer.machine.usd_per_hour, hours_by_speed, offer.throughputs))
    return [
        f"machine      {machine}",
        *describe(estimate.run.model, estimate.run.train, plan),
        "",
        *([*_table(rows), ""] if rows else []),
        *_layouts(estimate),
        *(_basis(priced) if len(priced) > 1 else []),
        *_spot(estimate, priced),
        *([] if len(priced) == len(possible) else [_UNKNOWN]),
        *_notes(estimate, priced),
        *_changes(estimate),
    ]


def _layouts(estimate: RunEstimate) -> list[str]:
    """Return a table of the machines on which another layout is cheaper than the run's layout, and a note on layouts.

    Each row has the cheapest layout, the second cheapest, and, for each value of "parallel", the smallest
    tensor_parallel that fits.
    """
    rows, execution = [], estimate.run.train.execution
    run_layout, model = f"{execution.parallel}/{execution.tensor_parallel}", estimate.run.model
    for layouts in estimate.layouts:
        (cheapest, first), *remaining = layouts.items()
        usd = first.usd()
        if run_layout not in layouts or layouts[run_layout].usd() > usd:
            pricier = (f"{name} +{offer.usd() / usd - 1:.0%}" for name, offer in remaining if offer.usd() > usd)
            smallest = {name.partition("/")[0]: name for name in sorted(layouts, reverse=True)}
            name = first.machine.name.rpartition(" x ")[2]
            _, _, speed, *_ = _row(name, None, [first.hours()], first.throughputs[-1:])
            cells = [name, cheapest, f"{first.largest}", speed, rough_number(usd)]
            rows.append([*cells, next(pricier, ""), " ".join(smallest.values())])
    headings = ["machine", "layout", "batch", "tokens/s", "$", "next", "fits from"]
    table = [*_table(rows, headings, ("left", "left", *["right"] * 3, "left", "left")), ""] if rows else []
    divisors = (f"{count}" for count in shard_counts(model) if count <= NODE_GPUS)
    legend = "the table above shows parallel/tensor_parallel and the largest micro-batch; on other machines, "
    note = (
        f"layouts: {legend * bool(rows)}{run_layout} is the cheapest according to the estimate, "
        f"which assumes {EXCHANGES}; tensor_parallel may be {', '.join(divisors)}"
    )
    return [*table, note] if estimate.layouts else []


def _table(rows: list[list[str]], headings: list[str] = _HEADINGS, columns: tuple[str, ...] = _COLUMNS) -> list[str]:
    """Return the rows as the lines of a table that fits into a terminal. Long machine names are wrapped."""
    rule = tabulate([row[1:] for row in rows], headings[1:], disable_numparse=True).splitlines()[1]
    widths = [max(8, WIDTH - 2 - len(rule))]
    return tabulate(rows, headings, disable_numparse=True, colalign=columns, maxcolwidths=widths).splitlines()


def _row(name: str, price: float | None, hours: list[float], speeds: list[Throughput]) -> list[str]:
    """Return a machine's row. A cell is a range if there are two numbers: an estimate, and another trainer's speed."""
    rates = [speed.tokens_per_second for speed in speeds]
    costs = [time_cost(3600 * run_hours, price) for run_hours in hours]
    return [
        printable(name),
        "" if price is None else f"{price:,.2f}",
        _range([f"{rate / 1e6:.2f}M" if rate >= 1e6 else f"{rate / 1e3:.{int(rate < 1e5)}f}K" for rate in rates]),
        _range([rough_number(run_hours) for run_hours in hours]),
        _range(["" if usd is None else rough_number(usd) for usd in costs]),
        ", ".join(dict.fromkeys(speed.kind for speed in reversed(speeds))),
    ]


def _range(texts: list[str]) -> str:
    """Return the first and the last text as a range, or a single text if the two are the same."""
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]}-{texts[-1]}"


def _basis(priced: list[Offer]) -> list[str]:
    """Return lines about the cheapest machine, the fastest machine, and the cheapest machine with a measurement."""
    best = {"cheapest": min(priced, key=Offer.usd), "fastest": min(priced, key=Offer.hours)}
    if measured := [offer for offer in priced if offer.throughputs[-1].measured]:
        best["cheapest with a measurement"] = min(measured, key=Offer.usd)
    return [
        f"{word}: {offer.machine.name}, ${rough_number(offer.usd())} in {rough_number(offer.hours())} hours "
        f"({offer.throughputs[-1].kind})"
        for word, offer in best.items()
    ]


def _spot(estimate: RunEstimate, priced: list[Offer]) -> list[str]:
    """Return a note: the assumptions about spot machines, and the best checkpoint interval on the cheapest of them."""
    offer = min((offer for offer in priced if offer.preemptions), key=Offer.usd, default=None)
    if offer is None or offer.plan is None or offer.preemptions is None:
        return []
    train, plan, speed = estimate.run.train, offer.plan, offer.throughputs[-1].tokens_per_second
    # Number of validation tokens that are read for each checkpoint
    validated_tokens = len(plan.sources) * plan.validation_sequences * plan.layout.context_length
    seconds = offer.preemptions.best_interval_seconds(VALIDATION_SHARE * validated_tokens / speed)
    steps = max(1, min(round(seconds * speed / plan.tokens_per_step), plan.steps))
    return [
        f"spot: expected values for checkpoint_interval {train.checkpoints.checkpoint_interval}, if each machine is "
        f"preempted without notice {estimate.prices.preemptions_per_hour:g} times per hour (--preemptions); the best "
        f"interval for {offer.machine.name}: --set checkpoint_interval={steps}; the wait for a new machine is not "
        "included"
    ]


def _notes(estimate: RunEstimate, priced: list[Offer]) -> list[str]:
    """Return notes on the columns, on the assumptions behind them, and on settings that the table ignores."""
    prices, (seconds, jobs), train = estimate.prices, estimate.start_up, estimate.run.train
    basis = f"measured, median of this run's {jobs} earlier jobs" if jobs else "an assumption"
    dates = sorted({offer.machine.date or prices.date for offer in estimate.offers})
    gib = sorted(offer.bytes / GIB for offer in estimate.offers)
    lines = [
        f"prices of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}: {shown(prices.path)}; time on the "
        "machine before and after the run is not included",
        f"hours: training, validation, and {seconds:.0f} s of start-up ({basis})",
        f"memory: {_range([f'{gib[0]:.1f}', f'{gib[-1]:.1f}'])} GiB per GPU at micro-batch "
        f"{train.batch.microbatch_size}; {CALIBRATION}",
    ]
    if train.batch.global_batch_size is None and len({offer.machine.gpus for offer in estimate.offers}) > 1:
        lines.append("without global_batch_size, the batch and the number of steps depend on the machine")
    speeds = [speed for offer in priced for speed in offer.throughputs]
    kinds = {speed.kind for speed in speeds}
    if kinds & {ESTIMATE, ROUGH, SIMULATION}:
        lines.append(ESTIMATE_CAUTION)
    if ROUGH in kinds:
        lines.append(f"{ROUGH}: an estimate with a roofline that was fitted to a similar GPU, not to this one")
    if estimate.network.nodes > 1:
        lines.append(
            f"simulation: the computation time of one node plus communication at {estimate.network.link:g} GB/s "
            "between nodes, but without the communication that the last micro-batch's backward pass hides; none of "
            "this is measured (docs/nodes.md)"
        )
    if trainers := sorted({speed.trainer or "" for speed in speeds if speed.kind == OTHERS}):
        lines.append(
            f"{OTHERS}: measured for a network of this shape by the author of another trainer: {', '.join(trainers)}"
        )
    if train.execution.precision not in ("auto", "bf16") or train.execution.compile is False:
        lines.append("memory and tokens/s are for bf16 with compiled blocks; this run needs more memory and time")
    return lines


def _changes(estimate: RunEstimate) -> list[str]:
    """Return lines about the machines that need another micro-batch or cannot train the run at all."""
    settings, changes = estimate.run.train.batch, dict[str, list[str]]()
    run_size, batch = settings.microbatch_size, settings.global_batch_size
    for offer in estimate.offers:
        change = offer.problem
        if offer.plan is not None and (size := offer.plan.layout.microbatch_size) != run_size and offer.throughputs:
            gpus = f"some of the {offer.machine.gpus} GPUs"
            idle = f"a batch of {batch} in micro-batches of {run_size} leaves {gpus} idle"
            change = f"{idle if offer.fits else f'{run_size} does not fit'}; start with --set microbatch_size={size}"
        if change is not None and offer.preemptions is None:  # the machine's own line also covers its spot offer
            changes.setdefault(change, []).append(offer.machine.name)
    return [f"{', '.join(names)}: {change}" for change, names in changes.items()]
