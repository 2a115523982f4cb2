"""Dry run of train.py: the arithmetic of a run, or with --plan a table of its hours and dollars on machines for rent.

Machines with the GPUs that the run directory is named after come first, then the cheapest. Below are the assumptions,
and the forecast of the run's final loss: forecast.json in its directory, written by experiment.py ladder.
"""

import json
import math
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import attrs
from tabulate import tabulate

from common.checks import ValueCheck, integer, number, structured, text
from common.errors import refusing
from common.json_files import read_json, read_json_lines
from common.output import show
from common.text import printable, quoted, rough_number, time_cost
from model.axes import TENSOR_AXES, axes_of, plain_name
from model.config import ModelConfig, shard_counts
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.lookup import checkpoint_titled, find_to_resume
from training.checkpoints.saved_state import read_state, weights_digest
from training.command import TrainCommand
from training.config.batch_plan import VALIDATION_SHARE, describe, make_plan
from training.config.train_config import Run, TrainConfig, recipe
from training.data.locate_tokens import lengths_of, streams_at_hand
from training.data.open_tokens import check_objective
from training.data.verify_tokens import tokens_at_hand
from training.initial_weights import InitialWeights, check_origin
from training.parallel.process_group import RankGroup
from training.planning.estimate import Offer, RunEstimate, make_estimate
from training.planning.job_options import describe_options
from training.planning.memory_model import CALIBRATION, GIB, NODE_GPUS, STATE_BYTES, MemoryModel
from training.planning.network_sizes import network_sizes
from training.planning.price_list import MACHINES, read_machines, shown
from training.planning.throughput import ESTIMATE, EXCHANGES, MEASURED, OTHERS, ROUGH, SIMULATION, Network, Throughput
from training.telemetry.metrics_log import EVALUATIONS, GIVEN_TOKENIZER, WEIGHTS_FILE

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
FORECAST = "forecast.json"
_CORE = number(-100, 1)  # centered on chance: 1 is all right, and below 0 is worse than chance
WINDOWS = ("validation_sequences", "start_val_token")  # on which the loss is measured
_AGAIN = "run experiment.py ladder again"


def dry_run(run: Run, command: TrainCommand, initial: InitialWeights | None) -> None:
    """Print what a run would do; needs no GPU. Raises BadInput, also where --init-from could not begin it or go on."""
    if initial is not None:
        wanted = command.options.resume
        found = None if wanted == "never" else find_to_resume(checkpoints_of(run.directory), wanted)
        if found is not None:
            check_origin(initial, read_state(found).config.initial_weights, found)
        else:
            token_set = tokens_at_hand(run.train, command.options.token_files)
            tokenizer = token_set.tokenizer[1] if token_set and token_set.tokenizer else None
            initial.load_checked(run.model, run.directory / "model.json", tokenizer)
    streams = streams_at_hand(run.train, command.options.token_files)
    check_objective(run, streams.values())
    lengths = lengths_of(streams)
    if command.dry_run:
        ranks = command.world_size or run.train.execution.tensor_parallel
        plan = make_plan(run.train, run.model.context_length, ranks, lengths)
        lines = describe(run.model, run.train, plan)
        lines += describe_shards(MemoryModel.of(run.model, run.train, ranks)) if run.train.execution.shards > 1 else []
        lines += describe_options(run, command, plan)
    else:
        prices = read_machines(command.machines or MACHINES, command.machine)
        prices = attrs.evolve(prices, preemptions_per_hour=command.preemptions or prices.preemptions_per_hour)
        network = Network(nodes=command.nodes, link=command.node_link or math.inf)
        estimate = make_estimate(run, prices, lengths, network, command.options.price_per_hour)
        lines = wrapped([*describe_estimate(estimate), *describe_forecast_file(run), *describe_core(run)])
    show(*wrapped(map(str, run.notices)), *lines)


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


@attrs.frozen(kw_only=True)
class ForecastPoint:
    """A run of the ladder, by which the law was fitted."""

    parameters: int = attrs.field(validator=integer(1))
    tokens: int = attrs.field(validator=integer(1))
    loss: float = attrs.field(validator=number(0, above=True))


@attrs.frozen(kw_only=True)
class ForecastTarget:
    loss: float = attrs.field(validator=number(0, above=True))
    low: float = attrs.field(validator=number(0))
    high: float = attrs.field(validator=number(0))
    extrapolation: float = attrs.field(validator=number(0, above=True))

    def __attrs_post_init__(self) -> None:
        if not self.low <= self.loss <= self.high:
            raise ValueError(f"low, loss, high: got {self.low}, {self.loss} and {self.high}, wanted rising numbers")


@attrs.frozen(kw_only=True)
class ForecastMiss:
    error: float = attrs.field(validator=number(0))  # relative, of the largest size


@attrs.frozen(kw_only=True)
class ForecastRecord:
    """The part of a target's forecast.json that is shown; experiment.py ladder writes the file."""

    date: str = attrs.field(validator=text())
    commit: str | None
    recipe: dict[str, dict[str, Any]]
    target: ForecastTarget
    points: list[ForecastPoint] = attrs.field(validator=ValueCheck(bool, "the runs of a ladder"))
    held_out: ForecastMiss


def recipe_of(run: Run) -> dict[str, dict[str, Any]]:
    """Return the keys that determine the final loss, as JSON would give them back: a forecast is valid for these."""
    train = run.train.flat()
    keys = recipe(run.model, run.train)
    keys["train"] |= {key: train[key] for key in WINDOWS}
    stored: dict[str, dict[str, Any]] = json.loads(json.dumps(keys))
    return stored


def describe_forecast_file(run: Run) -> list[str]:
    """Return a run's forecast as lines; none without a file. Raises BadInput for a damaged one."""
    path = run.directory / FORECAST
    if not path.exists():
        return []
    advice = f"move it away, or {_AGAIN}"
    kinds = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
    with refusing(f"{path}: not a ladder's forecast", advice, kinds):
        record = structured(read_json(path, advice=advice), ForecastRecord, unknown_keys=True)
        if changed := _changed_key(recipe_of(run), record.recipe):
            return [f"forecast     not for this run: {changed}; {_AGAIN}"]
        target, points, missed = record.target, len(record.points), 100 * record.held_out.error
        return [
            f"forecast     loss {target.loss:.4f} [{target.low:.4f}, {target.high:.4f}], 90 % interval of one "
            f"run, at {target.extrapolation:.3g} x the compute of its ladder's largest run",
            f"             ladder of {points} runs, {record.date}, commit {record.commit}: its largest size, "
            f"held out, was missed by {missed:.1f} % on average",
        ]


def describe_core(run: Run) -> list[str]:
    """Return the newest CORE, of all tasks or some, that evaluate.py stored of a run, as a line; none without one.

    A score of other weights than the checkpoint of its name has now is left out; one without their hash says so.
    """
    for record in reversed(read_json_lines(run.directory / EVALUATIONS, containing=b'"core"').records):
        if record.get("evaluation") == "core" and _CORE.holds(core := record.get("core")):
            title = str(record.get("model"))
            measured = record.get(WEIGHTS_FILE)
            now = weights_digest(checkpoint_titled(run.directory, title))
            if measured is not None and now is not None and measured != now:
                continue
            unknown = "" if measured is not None else ", weights unknown"
            shown = f"{core:.4f}" + (f" ± {error:.4f}" if number(0).holds(error := record.get("core_error")) else "")
            limits = "".join(f", {limit}" for limit in _limits_of_core(record))
            return [f"core         {shown}, {title}{unknown}{limits}, {record.get('time')}; see evaluate.py compare"]
    return []


def _limits_of_core(record: dict[str, Any]) -> list[str]:
    """Return how much of CORE a stored score covers, and a tokenizer that is not known to be the run's own."""
    tasks, data, given = (record.get(key) for key in ("tasks", "data", GIVEN_TOKENIZER))
    limits = [f"of {len(tasks)} tasks"] if isinstance(tasks, dict) else []
    if isinstance(data, dict) and type(data.get("count")) is int:
        limits.append(f"at most {data['count']:,} items of each")
    if isinstance(given, dict):
        limits.append(f"read by tokenizer {given.get('name')} of --tokenizer")
    return limits


def describe_shards(memory: MemoryModel) -> list[str]:
    """Return the parameters of a rank in tensor shards, those of all layers as one."""
    (shards, tensor_size), layers, rows = memory.tensor, memory.model.n_layers, {}
    sizes, ranks = network_sizes(memory.model, shards, tensor_size), RankGroup(rank=0, size=memory.shards)
    for name, part in {**sizes.outer, **sizes.block}.items():
        axes, plain = axes_of(name, memory.model), plain_name(name).replace(".0.", ".*.")
        columns = [axes.columns] if axes.columns else []
        cut = [axis for axis in (*axes.rows, *columns) if axis.name in TENSOR_AXES]
        parts = [f"{axis.name} {min(shards, axis.parts or shards)}" for axis in cut]
        size = STATE_BYTES * (shards // tensor_size) * ranks.chunk(part.shape[0]) * math.prod(part.shape[1:])
        shown = " x ".join([" ".join(axes.row_names), *(axis.name for axis in columns)])
        size *= layers if "*" in plain else 1
        rows[plain] = [plain, shown, ", ".join(dict.fromkeys(parts)) or "whole", f"{size:,}"]
    divided = f", {memory.parallel} on {memory.shards}" * memory.sharded
    heads, sides = ["parameter", "axes", "shards", "bytes a rank"], ("left", "left", "left", "right")
    table = tabulate([*rows.values()], heads, disable_numparse=True, colalign=sides)
    return [f"shards       {shards}, {shards // tensor_size} on each rank{divided}", *table.splitlines()]


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


def _changed_key(now: dict[str, dict[str, Any]], recorded: dict[str, dict[str, Any]]) -> str | None:
    """Return the first key that differs from the forecast's, where one that is absent has its default."""
    model = structured(recorded["model"], ModelConfig, unknown_keys=True)
    before = recipe(model, TrainConfig.from_record({"microbatch_size": 1} | recorded["train"]))
    before["train"] |= {key: recorded["train"].get(key, now["train"][key]) for key in WINDOWS}
    for section, values in now.items():
        for key, value in values.items():
            if value != (was := before[section][key]):
                return f"{section}.json: {key} is {quoted(value)}, and was {quoted(was)} when it was made"
    return None
