"""What a run would take on machines that one does not have: memory, hours, dollars."""

import attrs

from errors import BadInput
from training.config import Run
from training.machines import Machine, PriceList
from training.memory import CALIBRATION, GIB, gpu_bytes, largest_microbatch, predict, remedies
from training.plan import Plan, make_plan
from training.throughput import OURS, ROOFLINE, SIMILAR, Throughput, measurements, throughput

VALIDATION_SHARE = 1 / 3  # of a training token's time: forward only
START_UP_SECONDS = 120.0  # a guess: downloading and reading 20 GB of tokens, compiling; not of the machine's own boot


@attrs.frozen(kw_only=True)
class Offer:
    """A run on a machine."""

    machine: Machine
    plan: Plan | None  # with the run's micro-batch, or one that fits; None: `problem` says why there is none
    problem: str | None
    largest: int | None  # micro-batch that fits, sequences; None: not even one
    bytes: int  # that a GPU has to have at the run's own micro-batch
    throughput: Throughput

    @property
    def fits(self) -> bool:
        """True where the run's own micro-batch fits."""
        return self.bytes <= gpu_bytes(self.machine.gpu)


def make_offers(run: Run, prices: PriceList, lengths: dict[str, int | None]) -> list[Offer]:
    """Return what the run would take on each machine. Raises BadInput when, as it is, it can run on none of them."""
    offers = [_offer(run, machine, lengths) for machine in prices.machines]
    if not any(offer.fits for offer in offers):
        raise BadInput(_too_big(run, offers))
    if not any(offer.plan for offer in offers):
        raise BadInput(next(offer.problem for offer in offers if offer.problem is not None))
    return offers


def run_seconds(run: Run, plan: Plan, tokens_per_second: float) -> float:
    """Return the wall clock of a whole run: training, validation on all GPUs, start-up; saves are written behind it."""
    interval, validated_tokens = run.train.validation_interval, 0
    if interval is not None:
        due = {0, plan.steps, *range(0, plan.steps, interval), *range(0, plan.steps, run.train.checkpoint_interval)}
        validated_tokens = len(due) * plan.validation_sequences * plan.layout.context_length
    tokens = plan.train_tokens + VALIDATION_SHARE * validated_tokens
    return START_UP_SECONDS + tokens / tokens_per_second


def describe_offers(run: Run, prices: PriceList, offers: list[Offer]) -> list[str]:
    """Return the offers as lines for people, the cheapest and the fastest marked."""
    from tabulate import tabulate

    possible = [offer for offer in offers if offer.plan is not None]
    cheapest = min(possible, key=lambda offer: _hours(run, offer) * offer.machine.usd_per_hour)
    fastest = min(possible, key=lambda offer: _hours(run, offer))
    rows = []
    for offer in offers:
        marks = [word for word, best in (("cheapest", cheapest), ("fastest", fastest)) if best is offer]
        rows.append([*_cells(run, offer), ", ".join(marks)])
        if offer.plan is not None:
            rows += [_other(run, offer.plan, offer.machine, row) for row in _others(run, offer)]
    heads = ["machine", "$/hour", "batch", "largest", "GiB", "tokens/s", "hours", "$", "throughput", ""]
    columns = ("left", *["right"] * 7, "left", "left")
    return [
        *tabulate(rows, heads, disable_numparse=True, colalign=columns).splitlines(),
        "",
        *_notes(run, prices, offers),
    ]


def _offer(run: Run, machine: Machine, lengths: dict[str, int | None]) -> Offer:
    shape, room = (run.model, run.train.parallel, machine.gpus), gpu_bytes(machine.gpu)
    needed = predict(*shape, run.train.microbatch_size, run.train.thrift).total
    largest = largest_microbatch(*shape, room, run.train.thrift)
    plan, problem = None, None
    try:
        if needed <= room:
            plan = make_plan(run, machine.gpus, lengths)
        elif largest is None or run.train.global_batch_size is None:
            problem = f"micro-batch {run.train.microbatch_size} does not fit; the largest that does: {largest}"
        else:
            size = _microbatch_that_fits(run, machine.gpus, largest)
            smaller = attrs.evolve(run, train=attrs.evolve(run.train, microbatch_size=size))
            plan = make_plan(smaller, machine.gpus, lengths)
    except BadInput as error:  # such as a world size that does not divide the batch
        problem = str(error)
    return Offer(
        machine=machine,
        plan=plan,
        problem=problem,
        largest=largest,
        bytes=needed,
        throughput=throughput(run.model, machine),
    )


def _hours(run: Run, offer: Offer) -> float:
    assert offer.plan is not None
    return run_seconds(run, offer.plan, offer.throughput.tokens_per_second) / 3600


def _cells(run: Run, offer: Offer) -> list[str]:
    machine, plan = offer.machine, offer.plan
    memory = f"{offer.bytes / GIB:.1f} of {gpu_bytes(machine.gpu) / GIB:.1f}"
    start = [machine.name, f"{machine.usd_per_hour:,.2f}"]
    if plan is None:
        return [*start, "", f"{offer.largest or 'none'}", memory, "", "", "", "no, see below"]
    layout, hours = plan.layout, _hours(run, offer)
    return [
        *start,
        f"{layout.microbatch_size} x {layout.accumulation} x {layout.world_size}",
        f"{offer.largest}",
        memory,
        f"{offer.throughput.tokens_per_second:,.0f}",
        f"{hours:.2f}",
        f"{hours * machine.usd_per_hour:,.2f}",
        offer.throughput.source,
    ]


def _others(run: Run, offer: Offer) -> list[Throughput]:
    """Return what trainers other than this one have been measured at on the machine."""
    return [row for row in measurements(run.model, offer.machine) if row.source != OURS]


def _other(run: Run, plan: Plan, machine: Machine, row: Throughput) -> list[str]:
    """Return the line of another trainer, for the same tokens on the same machine."""
    hours = run_seconds(run, plan, row.tokens_per_second) / 3600
    cost = f"{hours * machine.usd_per_hour:,.2f}"
    return [*[""] * 5, f"{row.tokens_per_second:,.0f}", f"{hours:.2f}", cost, "another trainer", ""]


def _microbatch_that_fits(run: Run, world_size: int, largest: int) -> int:
    """Return the largest micro-batch that fits and keeps the global batch, where one is set."""
    batch = run.train.global_batch_size
    if batch is None:
        return largest
    return max((size for size in range(1, largest + 1) if batch % (size * world_size) == 0), default=1)


def _notes(run: Run, prices: PriceList, offers: list[Offer]) -> list[str]:
    size = run.train.microbatch_size
    lines = [
        f"prices of {prices.date}: {prices.path}; what a machine costs before and after the run is not in here",
        f"hours: training, validation, and {START_UP_SECONDS:.0f} s of start-up (a guess)",
        "batch: micro-batch x accumulation x GPUs; largest: the largest micro-batch that fits",
        f"GiB: of each GPU, at micro-batch {size}; {CALIBRATION}",
    ]
    if any(offer.throughput.source in (ROOFLINE, SIMILAR) for offer in offers):
        lines.append(
            "roofline: not measured; fitted to llm.c, the fastest published trainer of GPT-2, on 8 x A100 and H100"
        )
    if others := sorted({row.source for offer in offers for row in _others(run, offer)}):
        lines.append(f"another trainer: measured by its author, for a network of this shape: {', '.join(others)}")
    for offer in offers:
        if offer.problem is not None:
            lines.append(f"{offer.machine.name}: {offer.problem}")
        elif offer.plan is not None and not offer.fits:
            fitting = offer.plan.layout.microbatch_size
            lines.append(f"{offer.machine.name}: {size} does not fit; start with --set microbatch_size={fitting}")
    return lines


def _too_big(run: Run, offers: list[Offer]) -> str:
    """Return one line that says why the run fits on no machine, and what would fit."""
    size, kind = run.train.microbatch_size, run.train.parallel
    roomiest = max(offers, key=lambda offer: gpu_bytes(offer.machine.gpu))
    room = f"{gpu_bytes(roomiest.machine.gpu) / GIB:.1f} GiB of {roomiest.machine.name}"
    if any(offer.largest is not None for offer in offers):
        best = max(offers, key=lambda offer: offer.largest or 0)
        fitting = _microbatch_that_fits(run, best.machine.gpus, best.largest or 1)
        least = min(offer.bytes for offer in offers) / GIB
        return (
            f"{run.directory / 'train.json'}: microbatch_size: got {size}, which needs {least:.1f} GiB of a GPU, more "
            f"than the {room}; the largest that fits is {best.largest}, on {best.machine.name}: set "
            f"microbatch_size={fitting}"
        )
    needs = min(predict(run.model, kind, offer.machine.gpus, 1, run.train.thrift).total for offer in offers) / GIB
    advice = remedies(
        run.model, kind, roomiest.machine.gpus, gpu_bytes(roomiest.machine.gpu), muon=run.train.thrift.muon
    )
    return (
        f"{run.directory / 'model.json'}: too big for every machine: under {kind} one sequence needs {needs:.1f} GiB "
        f"of a GPU, more than the {room}; {advice}"
    )
