"""Table of --plan: memory, hours and dollars of a run on machines for rent, and the assumptions.

Machines with the GPUs that the run directory is named after come first, then the cheapest.
"""

import re
import textwrap
from collections.abc import Iterable

from tabulate import tabulate

from common.text import printable, rough_number, time_cost
from model.config import shard_counts
from training.config.batch_plan import VALIDATION_SHARE, describe
from training.planning.estimate import Offer, RunEstimate
from training.planning.memory_model import CALIBRATION, GIB, NODE_GPUS
from training.planning.price_list import shown
from training.planning.throughput import ESTIMATE, EXCHANGES, MEASURED, OTHERS, ROUGH, SIMULATION, Throughput

_HEADS = ["machine", "$/hour", "tokens/s", "hours", "$", "kind"]
_COLUMNS = ("left", *["right"] * 4, "left")
WIDTH = 80  # of a terminal
_UNKNOWN = (
    "tokens/s of so small a network are measured, not estimated: train.py RUN --max-steps 100 does so on this machine, "
    "and its row comes first; --price-per-hour gives it dollars"
)
ESTIMATE_CAUTION = (
    "estimate: a roofline of the bytes that Lockstep's kernels move, and of matrix products and attention as fast as "
    "llm.c's on 8 x A100 and H100, with micro-batches that fill the GPU; it leaves out the cost of recompute_blocks, "
    "loss_chunks and FSDP's gathers, and that products of tensor shards are smaller; expect less"
)


def wrapped(lines: Iterable[str]) -> list[str]:
    """Return lines of a terminal's width; those that follow are indented as far as the text after a label."""
    wraps = []
    for line in lines:
        label = re.match(r"[a-z]* {2,}", line)
        indent = " " * (len(label[0]) if label else 2)
        wraps += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [line]
    return wraps


def describe_estimate(estimate: RunEstimate) -> list[str]:
    possible = [offer for offer in estimate.offers if offer.plan is not None]
    ranks = estimate.run.train.execution.tensor_parallel
    plan, machine = estimate.own, f"{ranks} process{'es' * (ranks > 1)}; the directory's name has no number of GPUs"
    if plan is None:
        plan, machine = possible[0].plan, possible[0].machine.name
    elif (gpus := estimate.asked) is not None:
        machine = f"{gpus} GPU{'s' * (gpus > 1)}, by the directory's name"
    assert plan is not None
    known = [offer for offer in possible if offer.throughputs]
    rows = []
    if estimate.last_job is not None:
        speed, hours, price = estimate.last_job
        rows.append(_row("its last job", price, [hours], [Throughput(speed, MEASURED)]))
    for offer in known:
        each = [offer.hours(speed.tokens_per_second) for speed in reversed(offer.throughputs)]
        rows.append(_row(offer.machine.name, offer.machine.usd_per_hour, each, offer.throughputs))
    return [
        f"machine      {machine}",
        *describe(estimate.run.model, estimate.run.train, plan),
        "",
        *([*_table(rows), ""] if rows else []),
        *_layouts(estimate),
        *(_basis(known) if len(known) > 1 else []),
        *_spot(estimate, known),
        *([] if len(known) == len(possible) else [_UNKNOWN]),
        *_notes(estimate, known),
        *_changes(estimate),
    ]


def _layouts(estimate: RunEstimate) -> list[str]:
    """Return the cheapest layout of each machine where it is not the run's own, and the least ones of each kind."""
    rows, execution = [], estimate.run.train.execution
    own, model = f"{execution.parallel}/{execution.tensor_parallel}", estimate.run.model
    for layouts in estimate.layouts:
        (cheapest, first), *others = layouts.items()
        usd = first.usd()
        if own not in layouts or layouts[own].usd() > usd:
            more = next((f"{name} +{offer.usd() / usd - 1:.0%}" for name, offer in others if offer.usd() > usd), "")
            least = {name.partition("/")[0]: name for name in sorted(layouts, reverse=True)}
            name = first.machine.name.rpartition(" x ")[2]
            _, _, speed, *_ = _row(name, None, [first.hours()], first.throughputs[-1:])
            rows.append([name, cheapest, f"{first.largest}", speed, rough_number(usd), more, " ".join(least.values())])
    heads = ["machine", "layout", "batch", "tokens/s", "$", "next", "fits from"]
    table = [*_table(rows, heads, ("left", "left", *["right"] * 3, "left", "left")), ""] if rows else []
    divisors = (f"{each}" for each in shard_counts(model) if each <= NODE_GPUS)
    note = (
        f"layouts: {'above, parallel/tensor_parallel, and the largest micro-batch; else ' * bool(rows)}{own} is the "
        f"cheapest by the estimate, at {EXCHANGES}; tensor_parallel may be {', '.join(divisors)}"
    )
    return [*table, note] if estimate.layouts else []


def _table(rows: list[list[str]], heads: list[str] = _HEADS, columns: tuple[str, ...] = _COLUMNS) -> list[str]:
    """Return the rows as lines of a terminal's width: long names of machines are wrapped."""
    others = tabulate([row[1:] for row in rows], heads[1:], disable_numparse=True).splitlines()[1]
    widths = [max(8, WIDTH - 2 - len(others))]
    return tabulate(rows, heads, disable_numparse=True, colalign=columns, maxcolwidths=widths).splitlines()


def _row(name: str, price: float | None, hours: list[float], speeds: list[Throughput]) -> list[str]:
    """Return the row of a machine: a range, where an estimate and another trainer's measurement disagree."""
    rates = [speed.tokens_per_second for speed in speeds]
    costs = [time_cost(3600 * each, price) for each in hours]
    return [
        printable(name),
        "" if price is None else f"{price:,.2f}",
        _range([f"{each / 1e6:.2f}M" if each >= 1e6 else f"{each / 1e3:.{int(each < 1e5)}f}K" for each in rates]),
        _range([rough_number(each) for each in hours]),
        _range(["" if usd is None else rough_number(usd) for usd in costs]),
        ", ".join(dict.fromkeys(speed.kind for speed in reversed(speeds))),
    ]


def _range(texts: list[str]) -> str:
    """Return the first and the last of texts, or the one that all are."""
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]}-{texts[-1]}"


def _basis(known: list[Offer]) -> list[str]:
    """Return the cheapest and the fastest machine, and the cheapest by measurements."""
    best = {"cheapest": min(known, key=Offer.usd), "fastest": min(known, key=Offer.hours)}
    if measured := [offer for offer in known if offer.throughputs[-1].measured]:
        best["cheapest of the measured"] = min(measured, key=Offer.usd)
    return [
        f"{word}: {offer.machine.name}, ${rough_number(offer.usd())} in {rough_number(offer.hours())} hours "
        f"({offer.throughputs[-1].kind})"
        for word, offer in best.items()
    ]


def _spot(estimate: RunEstimate, known: list[Offer]) -> list[str]:
    """Return the assumptions of spot machines, and the checkpoint interval that suits the cheapest."""
    offer = min((offer for offer in known if offer.preemptions), key=Offer.usd, default=None)
    if offer is None or offer.plan is None or offer.preemptions is None:
        return []
    train, plan, speed = estimate.run.train, offer.plan, offer.throughputs[-1].tokens_per_second
    validated = len(plan.sources) * plan.validation_sequences * plan.layout.context_length  # with each checkpoint
    seconds = offer.preemptions.best_interval_seconds(VALIDATION_SHARE * validated / speed)
    steps = max(1, min(round(seconds * speed / plan.tokens_per_step), plan.steps))
    return [
        f"spot: expected, with {estimate.prices.preemptions_per_hour:g} preemptions an hour of each machine "
        f"(--preemptions), without notice, checkpoint_interval {train.checkpoints.checkpoint_interval}; best for "
        f"{offer.machine.name}: --set checkpoint_interval={steps}; without the wait for another machine"
    ]


def _notes(estimate: RunEstimate, known: list[Offer]) -> list[str]:
    """Return the meaning of the columns, the assumptions behind them, and settings that they leave out."""
    prices, (seconds, jobs), train = estimate.prices, estimate.start_up, estimate.run.train
    measured = f"measured, median of this run's {jobs} earlier jobs" if jobs else "an assumption"
    dates = sorted({offer.machine.date or prices.date for offer in estimate.offers})
    gib = sorted(offer.bytes / GIB for offer in estimate.offers)
    lines = [
        f"prices of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}: {shown(prices.path)}; the machine's time "
        "before and after the run is not included",
        f"hours: training, validation, and {seconds:.0f} s of start-up ({measured})",
        f"memory: {_range([f'{gib[0]:.1f}', f'{gib[-1]:.1f}'])} GiB of each GPU at micro-batch "
        f"{train.batch.microbatch_size}; {CALIBRATION}",
    ]
    if train.batch.global_batch_size is None and len({offer.machine.gpus for offer in estimate.offers}) > 1:
        lines.append("no global_batch_size: the batch and the number of steps depend on the machine")
    speeds = [speed for offer in known for speed in offer.throughputs]
    kinds = {speed.kind for speed in speeds}
    if kinds & {ESTIMATE, ROUGH, SIMULATION}:
        lines.append(ESTIMATE_CAUTION)
    if ROUGH in kinds:
        lines.append(f"{ROUGH}: an estimate for a GPU that the roofline is not fitted to, but to a similar one")
    if estimate.network.nodes > 1:
        lines.append(
            f"simulation: computation as on one node, {estimate.network.link:g} GB/s between nodes, less what the last "
            "micro-batch's backward pass hides; nothing of it is measured (docs/nodes.md)"
        )
    if others := sorted({speed.trainer or "" for speed in speeds if speed.kind == OTHERS}):
        lines.append(
            f"{OTHERS}: measured for a network of this shape by the author of another trainer: {', '.join(others)}"
        )
    if train.execution.precision not in ("auto", "bf16") or train.execution.compile is False:
        lines.append("memory, tokens/s: for bf16, compiled; this run is not: it takes more memory and time")
    return lines


def _changes(estimate: RunEstimate) -> list[str]:
    """Return the machines that need another micro-batch, and those that cannot do the run, with the reason."""
    wanted, changes = estimate.run.train.batch, dict[str, list[str]]()
    own, batch = wanted.microbatch_size, wanted.global_batch_size
    for offer in estimate.offers:
        change = offer.problem
        if offer.plan is not None and (size := offer.plan.layout.microbatch_size) != own and offer.throughputs:
            idle = f"a batch of {batch} in micro-batches of {own} leaves some of {offer.machine.gpus} GPUs idle"
            change = f"{idle if offer.fits else f'{own} does not fit'}; start with --set microbatch_size={size}"
        if change is not None and offer.preemptions is None:  # else its machine is there
            changes.setdefault(change, []).append(offer.machine.name)
    return [f"{', '.join(names)}: {change}" for change, names in changes.items()]
