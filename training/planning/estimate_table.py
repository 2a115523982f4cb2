"""Dry run of train.py: the arithmetic of a run, or with --plan a table of its hours and dollars on machines for rent.

In the table measured machines are first, and bounds marked as bounds; then comes what the numbers assume.

Below it the forecast of the run's final loss: forecast.json in its directory, written by experiment.py ladder.
"""

import json
import math
from typing import Any

import attrs
from tabulate import tabulate

from common.errors import BadInput, printable, quoted
from common.json_files import read_json
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.saved_state import find, read_state
from training.command import TrainCommand
from training.config.batch_plan import describe, make_plan
from training.config.train_config import Run, one_form, recipe
from training.data.locate_tokens import lengths_at_hand
from training.initial_weights import InitialWeights, check_network, check_origin
from training.planning.estimate import Offer, RunEstimate, make_estimate
from training.planning.memory_model import CALIBRATION, GIB, gpu_bytes
from training.planning.price_list import MACHINES, read_machines, shown
from training.planning.throughput import ANOTHER_TRAINER, BOUND, SIMILAR, Network

_HEADS = ["machine", "$/hour", "batch", "largest", "GiB", "tokens/s", "hours", "$", "source of tokens/s", ""]
_COLUMNS = ("left", *["right"] * 7, "left", "left")
_UNKNOWN = (
    "tokens/s, hours and dollars of so small a network are unknown, and with them the cheapest machine: measure it "
    "(train.py RUN --max-steps 100) and enter tokens_per_second in a price list of your own (--machines)"
)
ESTIMATE_CAUTION = (
    "estimate: a roofline of the bytes that Lockstep's kernels move, and of matrix products and attention as fast as "
    "llm.c's on 8 x A100 and H100, with micro-batches that fill the GPU; expect less"
)
FORECAST = "forecast.json"
WINDOWS = ("validation_sequences", "start_val_token")  # on which the loss is measured
_AGAIN = "run experiment.py ladder again"


def dry_run(run: Run, command: TrainCommand, initial: InitialWeights | None) -> None:
    """Print what a run would do; needs no GPU, nor tokens with min_train_tokens.

    Raises BadInput, also where training could not begin with, or go on from, the weights of --init-from.
    """
    if initial is not None:
        wanted = command.options.resume
        found = None if wanted == "never" else find(checkpoints_of(run.directory), wanted)
        if found is not None:
            check_origin(initial, read_state(found).config.initial_weights, found)
        else:
            check_network(initial, initial.load().config, run.model, run.directory / "model.json")
    lengths = lengths_at_hand(run.train, command.options.token_files)
    if command.dry_run:
        plan = make_plan(run.train, run.model.context_length, command.world_size or 1, lengths)
        lines = describe(run.model, run.train, plan)
    else:
        prices = read_machines(command.machines or MACHINES, command.machine)
        network = Network(nodes=command.nodes, link=command.node_link or math.inf)
        lines = [*describe_estimate(make_estimate(run, prices, lengths, network)), *describe_forecast_file(run)]
    print("\n".join(map(printable, [*run.notices, *lines])))


def describe_estimate(estimate: RunEstimate) -> list[str]:
    """Return the run's arithmetic, the table and its notes, as lines."""
    plans = {offer.machine.name: offer.plan for offer in estimate.offers if offer.plan is not None}
    first, plan = next(iter(plans.items()))
    alike = all(other.layout == plan.layout for other in plans.values())
    machine = first + ("" if alike else "; the other machines' batches are in the table")
    if estimate.own is not None:
        gpus, plan = estimate.own
        machine = f"{gpus} GPU{'s' * (gpus > 1)}, by the directory's name"
        if all(offer.machine.gpus != gpus for offer in estimate.offers):
            machine += "; the price list has none: the table is of others, --machines takes a list of your own"
    lines = [f"machine      {machine}", *describe(estimate.run.model, estimate.run.train, plan)]
    possible = [offer for offer in estimate.offers if offer.plan is not None]
    known = [offer for offer in possible if offer.throughputs[0].known]
    compared = [offer for offer in known if offer.measured] or known
    best = {"cheapest": min(compared, key=Offer.usd), "fastest": min(compared, key=Offer.hours)} if compared else {}
    rows = []
    for offer in sorted(estimate.offers, key=lambda offer: not offer.measured):
        rows += _rows(offer, ", ".join(word for word, chosen in best.items() if chosen is offer))
    return [
        *lines,
        "",
        *tabulate(rows, _HEADS, disable_numparse=True, colalign=_COLUMNS).splitlines(),
        "",
        *(_basis(known, compared, best["cheapest"]) if best else [_UNKNOWN]),
        *_notes(estimate, possible),
        *_changes(estimate),
    ]


def recipe_of(run: Run) -> dict[str, dict[str, Any]]:
    """Return the keys that determine the final loss, as JSON would give them back: a forecast is valid for these."""
    train = run.train.flat()
    keys = recipe(attrs.asdict(run.model), train)
    keys["train"] |= {key: train[key] for key in WINDOWS}
    stored: dict[str, dict[str, Any]] = json.loads(json.dumps(keys))
    return stored


def describe_forecast_file(run: Run) -> list[str]:
    """Return a run's forecast as lines; none without a file. Raises BadInput for a damaged one."""
    path = run.directory / FORECAST
    if not path.exists():
        return []
    advice = f"move it away, or {_AGAIN}"
    try:
        record = read_json(path, advice=advice)
        if changed := _changed_key(recipe_of(run), record["recipe"]):
            return [f"forecast     not for this run: {changed}; {_AGAIN}"]
        target, points, missed = record["target"], len(record["points"]), 100 * record["held_out"]["error"]
        return [
            f"forecast     loss {target['loss']:.4f} [{target['low']:.4f}, {target['high']:.4f}], 90 % interval of one "
            f"run, at {target['extrapolation']:.3g} x the compute of its ladder's largest run",
            f"             ladder of {points} runs, {record['date']}, commit {record['commit']}: its largest size, "
            f"held out, was missed by {missed:.1f} % on average",
        ]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: not a ladder's forecast: {error}; {advice}") from None


def _rows(offer: Offer, marks: str) -> list[list[str]]:
    """Return a row for each throughput; a bound is at most so fast, and so the run takes at least so long."""
    machine = offer.machine
    cells = [
        printable(machine.name),
        f"{machine.usd_per_hour:,.2f}",
        "",
        f"{offer.largest or 'none'}",
        f"{offer.bytes / GIB:.1f} of {gpu_bytes(machine.gpu) / GIB:.1f}",
    ]
    if offer.plan is None:
        return [[*cells, "", "", "", "no, see below", ""]]
    layout = offer.plan.layout
    most = "" if layout.even else "<= "
    cells[2] = f"{layout.microbatch_size} x {most}{layout.accumulation} x {layout.data_parallel_size}"
    rows = []
    for throughput in offer.throughputs:
        most, least = ("<= ", ">= ") if throughput.source == BOUND else ("", "")
        hours, source = offer.hours(throughput.tokens_per_second), throughput.source
        if offer.measured and not throughput.measured:
            source += f", {throughput.tokens_per_second / offer.throughputs[0].tokens_per_second:.1f} x the measured"
        figures = [f"{most}{throughput.tokens_per_second:,.0f}", f"{least}{hours:.2f}"]
        figures.append(f"{least}{hours * machine.usd_per_hour:,.2f}")
        rows.append([*cells, *(figures if throughput.known else ["", "", ""]), source, marks])
        cells, marks = [""] * 5, ""
    return rows


def _basis(possible: list[Offer], compared: list[Offer], cheapest: Offer) -> list[str]:
    """Return the machines that "cheapest" and "fastest" compare, and a machine that another basis would prefer."""
    if cheapest.measured:
        sources = ", ".join(sorted({offer.throughputs[0].source for offer in compared}))
        lines = [f"cheapest, fastest: of the machines with known tokens/s ({sources})"]
        lowest = min((offer for offer in possible if not offer.measured), key=Offer.usd, default=cheapest)
        if lowest.usd() < cheapest.usd():
            price = f"${lowest.usd():,.2f}"
            lines.append(f"not measured, cheaper by its estimate: {lowest.machine.name}, {price}")
        return lines
    lines = ["cheapest, fastest: by estimates alone; nobody has measured a network of this shape on these machines"]
    fitted = [offer for offer in possible if offer.throughputs[0].source != SIMILAR]
    if fitted and cheapest not in fitted:
        best = min(fitted, key=Offer.usd)
        lines.append(
            f"cheapest: {cheapest.machine.name}, by a roofline that is not fitted to its GPU; of the others "
            f"{best.machine.name}, ${best.usd():,.2f}"
        )
    return lines


def _notes(estimate: RunEstimate, possible: list[Offer]) -> list[str]:
    """Return the meaning of the columns, the assumptions behind them, and settings that they leave out."""
    prices, start_up, train = estimate.prices, estimate.start_up, estimate.run.train
    measured = f"measured, median of this run's {start_up.jobs} earlier jobs" if start_up.jobs else "an assumption"
    lines = [
        f"prices of {prices.date}: {shown(prices.path)}; the machine's time before and after the run is not included",
        f"hours: training, validation, and {start_up.seconds:.0f} s of start-up ({measured})",
        "batch: micro-batch x accumulation x GPUs; largest: the largest micro-batch that fits",
        f"GiB: of each GPU, at micro-batch {train.batch.microbatch_size}; {CALIBRATION}",
    ]
    if train.batch.global_batch_size is None and len({offer.machine.gpus for offer in estimate.offers}) > 1:
        lines.append("no global_batch_size: the batch and the number of steps depend on the machine")
    shown_rows = [throughput for offer in possible for throughput in offer.throughputs]
    if any(row.known and not row.measured for row in shown_rows):
        lines.append(ESTIMATE_CAUTION)
        lines.append(
            "upper bound: at most so many tokens/s, at least so many hours and dollars: products, attention and memory "
            "at the datasheet's speed"
        )
    if estimate.network.nodes > 1:
        lines.append(
            f"simulation: computation as on one node, {estimate.network.link:g} GB/s between nodes, less what the last "
            "micro-batch's backward pass hides; nothing of it is measured (docs/nodes.md)"
        )
    if others := sorted({row.trainer or "" for row in shown_rows if row.source == ANOTHER_TRAINER}):
        lines.append(
            f"another trainer: measured by its author, for a network of this shape, not with Lockstep: "
            f"{', '.join(others)}"
        )
    if train.execution.precision not in ("auto", "bf16") or train.execution.compile is False:
        lines.append("GiB, tokens/s: for bf16, compiled; this run is not: it takes more memory and time")
    slower = {
        "recompute_blocks": train.memory.recompute_blocks,
        "loss_chunks": train.memory.loss_chunks > 1,
        f'parallel "{train.execution.parallel}"': train.execution.parallel != "ddp",
    }
    options = [option for option, given in slower.items() if given]
    if options and any(not offer.measured for offer in possible):
        lines.append(f"estimates leave out the cost of {' and '.join(options)}")
    return lines


def _changes(estimate: RunEstimate) -> list[str]:
    """Return the machines that need another micro-batch, and those that cannot do the run, with the reason."""
    wanted, lines = estimate.run.train.batch, []
    own, batch = wanted.microbatch_size, wanted.global_batch_size
    for offer in estimate.offers:
        name = offer.machine.name
        if offer.plan is None:
            lines.append(f"{name}: {offer.problem}")
        elif (size := offer.plan.layout.microbatch_size) != own:
            idle = f"a batch of {batch} in micro-batches of {own} leaves some of {offer.machine.gpus} GPUs idle"
            why = idle if offer.fits else f"{own} does not fit"
            lines.append(f"{name}: {why}; start with --set microbatch_size={size}")
    return lines


def _changed_key(now: dict[str, dict[str, Any]], recorded: dict[str, dict[str, Any]]) -> str | None:
    """Return the first key that differs from the forecast's, with both values.

    A key that the forecast lacks had its default; those of the validation windows are not known then.
    """
    before = recipe(one_form("model", recorded["model"]), one_form("train", {"microbatch_size": 1} | recorded["train"]))
    before["train"] |= {key: recorded["train"].get(key, now["train"][key]) for key in WINDOWS}
    for section, values in now.items():
        for key, value in values.items():
            if value != (was := before[section][key]):
                return f"{section}.json: {key} is {quoted(value)}, and was {quoted(was)} when it was made"
    return None
