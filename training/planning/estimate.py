"""Estimate of a run on machines for rent: memory, hours, dollars."""

import re
import statistics
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import attrs

from common.errors import BadInput
from model.config import ModelConfig
from model.counts import matmul_parameter_count
from tokens.batches.sampling import balance
from training.config.batch_plan import VALIDATION_SHARE, Plan, count_due, make_plan, microbatch_sizes
from training.config.train_config import Run, TrainConfig
from training.planning.memory_model import GIB, MemoryModel, gpu_bytes
from training.planning.price_list import Machine, PriceList
from training.planning.throughput import Network, Throughput, on_network, throughputs
from training.telemetry.metrics_log import read_lines

ONE_NODE = Network()
ASSUMED_START_UP_SECONDS = 120.0  # downloading and reading 20 GB of tokens, compiling; without the machine's own boot


@attrs.frozen(kw_only=True)
class StartUp:
    """Time from launch to the first ordinary step."""

    seconds: float
    jobs: int  # of the run, whose median it is; 0: an assumption


@attrs.frozen(kw_only=True)
class Offer:
    """A run on a machine."""

    machine: Machine
    plan: Plan | None  # with the run's micro-batch, or a smaller one; None: `problem` says why there is none
    problem: str | None
    largest: int | None  # micro-batch that fits, sequences; None: not even one
    bytes: int  # needed per GPU at the run's own micro-batch
    throughputs: list[Throughput]  # the first is the one to plan with
    start_up_seconds: float
    token_equivalents: float  # those of training, and as many as take as long as idle times and validations

    @property
    def fits(self) -> bool:
        """True where the run's own micro-batch fits."""
        return self.bytes <= gpu_bytes(self.machine.gpu)

    @property
    def measured(self) -> bool:
        """True where the throughput to plan with is no estimate."""
        return self.throughputs[0].measured

    def hours(self, tokens_per_second: float | None = None) -> float:
        """Return the wall clock of the whole run: start-up, training, validation. Saves overlap with training."""
        speed = tokens_per_second or self.throughputs[0].tokens_per_second
        return (self.start_up_seconds + self.token_equivalents / speed) / 3600

    def usd(self) -> float:
        """Return the price of the whole run."""
        return self.hours() * self.machine.usd_per_hour


@attrs.frozen(kw_only=True)
class RunEstimate:
    """A run on each machine of a price list; at least one of them can do it."""

    run: Run
    prices: PriceList
    start_up: StartUp
    network: Network
    own: tuple[int, Plan] | None  # GPUs by the run directory's name, on all nodes, and the run on them
    offers: tuple[Offer, ...]


def make_estimate(
    run: Run, prices: PriceList, lengths: Mapping[str, int | None], network: Network = ONE_NODE
) -> RunEstimate:
    """Estimate the run on each machine, or on several of each; `lengths` as for `make_plan`.

    Raises BadInput when it can run on none.
    """
    start_up = start_up_of(run.directory)
    for machine in prices.machines:
        _check_entered(run.model, prices.path, machine)
    offers = tuple(_offer(run, machine, lengths, start_up.seconds, network) for machine in prices.machines)
    if not any(offer.fits for offer in offers):
        raise BadInput(_too_big(run.model, run.train, offers))
    if not any(offer.plan for offer in offers):
        raise BadInput(next(offer.problem for offer in offers if offer.problem is not None))
    gpus, own = gpus_by_name(run.directory), None
    if gpus is not None:
        gpus *= network.nodes
        with suppress(BadInput):  # too few micro-batches for them: the table has other machines
            own = gpus, make_plan(run.train, run.model.context_length, gpus, lengths)
    return RunEstimate(run=run, prices=prices, start_up=start_up, network=network, own=own, offers=offers)


def gpus_by_name(run_directory: Path) -> int | None:
    """Return the GPUs of the machine that a run directory is named after: 8 for 8xa100, None for gpt-2xl."""
    found = re.search(r"(?:^|-)(\d{1,6})x(?!l(?:$|[a-z-]))[a-z]", run_directory.resolve().name)
    return int(found[1]) or None if found else None


def start_up_of(run_directory: Path) -> StartUp:
    """Return the start-up, compilation included, that earlier jobs of a run have measured, else the assumption."""
    ledgers = [record["ledger"] for record in read_lines(run_directory) if "ledger" in record]
    if not ledgers:
        return StartUp(seconds=ASSUMED_START_UP_SECONDS, jobs=0)
    seconds = statistics.median(ledger.get("start-up", 0.0) + ledger["compile"] for ledger in ledgers)
    return StartUp(seconds=seconds, jobs=len(ledgers))


def _check_entered(model: ModelConfig, path: Path, machine: Machine) -> None:
    """Raise BadInput for tokens/s that the machine's GPUs cannot reach: of another model, or mistyped."""
    most = machine.gpus * machine.gpu.peak_flops / (6 * matmul_parameter_count(model))  # matrix products alone
    if machine.tokens_per_second is not None and machine.tokens_per_second > most:
        raise BadInput(
            f"{path}: {machine.name}: tokens_per_second: got {machine.tokens_per_second:g}, more than the {most:,.0f} "
            f"that the peak of {machine.gpus} x {machine.gpu.name} allows for this model; enter this run's measured "
            "tokens/s, or leave it out"
        )


def _offer(
    run: Run, one: Machine, lengths: Mapping[str, int | None], start_up_seconds: float, network: Network
) -> Offer:
    """Return the run's offer of one machine, or of as many as the network has."""
    model, train = run.model, run.train
    machine = one if network.nodes == 1 else one.times(network.nodes)
    memory = MemoryModel.of(model, train, machine.gpus)
    largest = memory.largest_microbatch(gpu_bytes(machine.gpu))
    plan, problem = None, None
    try:
        smaller = train.replace(microbatch_size=_microbatch(train, machine, largest))
        plan = make_plan(smaller, model.context_length, machine.gpus, lengths)
    except BadInput as error:
        problem = str(error)
    speeds = throughputs(model, one)
    if network.nodes > 1 and plan is not None and speeds[0].known:
        speeds = [on_network(speeds[0], network, model, plan, gathers=train.execution.parallel == "fsdp")]
    return Offer(
        machine=machine,
        plan=plan,
        problem=problem,
        largest=largest,
        bytes=memory.predict(train.batch.microbatch_size).total,
        throughputs=speeds,
        start_up_seconds=start_up_seconds,
        token_equivalents=0 if plan is None else _token_equivalents(train, plan),
    )


def _token_equivalents(train: TrainConfig, plan: Plan) -> float:
    """Return the tokens that all GPUs together could train on in the run's time, validations included.

    Those are at intervals, and before the first step; each is on all datasets of a mixture: at most, as one may have no
    validation tokens.
    """
    trained = plan.train_tokens / balance(plan.layout.microbatches, plan.layout.data_parallel_size)
    interval = train.validation.validation_interval
    if interval is None:
        return trained
    validations = 1 + count_due(1, plan.steps, train.checkpoints.checkpoint_interval, interval)
    sequences = validations * len(plan.sources) * plan.validation_sequences
    return trained + VALIDATION_SHARE * sequences * plan.layout.context_length


def _microbatch(train: TrainConfig, machine: Machine, largest: int | None) -> int:
    """Return the run's micro-batch, or the largest smaller one that fits and keeps the batch. Raises BadInput."""
    size, batch = train.batch.microbatch_size, train.batch.global_batch_size
    if largest is None or (batch is None and size > largest):
        raise BadInput(f"micro-batch {size} does not fit; the largest that does: {largest or 'none'}")
    if batch is None:
        return size
    sizes = microbatch_sizes(batch, machine.gpus, min(size, largest))
    if not sizes:
        raise BadInput(
            f"{train.file}: global_batch_size: got {batch}, wanted at least one sequence for each of the "
            f"{machine.gpus} GPUs of {machine.name}"
        )
    return sizes[-1]


def _too_big(model: ModelConfig, train: TrainConfig, offers: tuple[Offer, ...]) -> str:
    size, batch = train.batch.microbatch_size, train.batch.global_batch_size
    roomiest = max((offer.machine for offer in offers), key=lambda machine: gpu_bytes(machine.gpu))
    room = f"more than the {gpu_bytes(roomiest.gpu) / GIB:.1f} GiB of {roomiest.name}"
    best = max(offers, key=lambda offer: offer.largest or 0)
    if best.largest is not None:
        fitting = [best.largest] if batch is None else microbatch_sizes(batch, best.machine.gpus, best.largest)
        advice = f"microbatch_size={fitting[-1]}" if fitting else "it, and a larger global_batch_size"
        least = min(offer.bytes for offer in offers) / GIB
        return (
            f"{train.file}: microbatch_size: got {size}, which needs {least:.1f} GiB of a GPU, {room}; the largest "
            f"that fits is {best.largest}, on {best.machine.name}: set {advice}"
        )
    needs = min(MemoryModel.of(model, train, offer.machine.gpus).predict(1).total for offer in offers) / GIB
    advice = MemoryModel.of(model, train, roomiest.gpus).remedies(gpu_bytes(roomiest.gpu))
    return (
        f"{train.file.with_name('model.json')}: too big for every machine: under {train.execution.parallel} one "
        f"sequence needs {needs:.1f} GiB of a GPU, {room}; {advice}"
    )
