"""Estimate the memory, hours and dollars of a run on rented machines, in the run's layout of ranks and in others."""

import math
import re
import statistics
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, Problem
from common.text import rough_number, time_cost
from model.config import ModelConfig, shard_counts
from model.counts import matmul_parameter_count
from tokens.batches.sampling import balance
from training.checkpoints.run_record import read_record
from training.command import WORLD_SIZE
from training.config.batch_plan import VALIDATION_SHARE, Plan, count_due, make_plan, microbatch_sizes
from training.config.key_groups import BatchOptions, ExecutionOptions, MemoryOptions
from training.config.train_config import Run, TrainConfig
from training.planning.memory_model import GIB, NODE_GPUS, MemoryModel, gpu_bytes
from training.planning.network_sizes import network_sizes
from training.planning.price_list import Machine, Preemptions, PriceList
from training.planning.throughput import SAME_SPEED, Network, Throughput, on_network, throughputs
from training.telemetry.budget import expected_save_seconds
from training.telemetry.metrics_log import Detail, Metric, RunEvent, event_of, last_price, read_counted

ONE_NODE = Network()
# Time for downloading 20 GB of tokens, reading them, and compiling. Booting the machine is not included.
ASSUMED_START_UP_SECONDS = 120.0


@attrs.frozen(kw_only=True)
class Offer:
    """The memory, time and money that a run needs on one machine."""

    machine: Machine
    # The plan with the run's micro-batch or a smaller one. None if no micro-batch is possible; `problem` says why.
    plan: Plan | None
    problem: str | None
    largest: int | None  # largest micro-batch that fits, in sequences; None: not even one sequence fits
    bytes: int  # memory needed per GPU at the micro-batch in train.json
    throughputs: list[Throughput]  # all known throughputs, the slowest first
    start_up_seconds: float
    # Training tokens, plus the tokens that the GPUs could train on while they are idle or validate
    token_equivalents: float
    preemptions: Preemptions | None = None  # only for a spot machine

    @property
    def fits(self) -> bool:
        return self.bytes <= gpu_bytes(self.machine.gpu)

    def seconds(self, tokens_per_second: float | None = None) -> float:
        """Return the wall-clock time of the whole run.

        The throughput defaults to the fastest one that is known. Saving a checkpoint is assumed to overlap with
        training.
        """
        work = self.token_equivalents / (tokens_per_second or self.throughputs[-1].tokens_per_second)
        if self.preemptions is not None:
            return self.preemptions.seconds(self.start_up_seconds, work)
        return self.start_up_seconds + work

    def hours(self, tokens_per_second: float | None = None) -> float:
        """Return `seconds` in hours."""
        return self.seconds(tokens_per_second) / 3600

    def usd(self) -> float:
        """Return the cost of the whole run at the fastest known throughput; infinite if no throughput is known."""
        usd = time_cost(self.seconds(), self.machine.usd_per_hour) if self.throughputs else None
        return math.inf if usd is None else usd


@attrs.frozen(kw_only=True)
class RunEstimate:
    """Estimates of a run on each machine of a price list. At least one of the machines can train the run."""

    run: Run
    prices: PriceList
    start_up: tuple[float, int]  # seconds before the first ordinary step, and number of measured jobs
    network: Network
    requested_gpus: int | None  # number of GPUs in the run directory's name, times the number of nodes
    # The plan for the requested GPUs or, if the name has no number, for one data-parallel rank per node. None if the
    # run has too few micro-batches for these ranks.
    named_plan: Plan | None
    last_job: tuple[float, float, float | None] | None  # logged tokens/s, hours of the run, USD per hour
    # First machines with the requested GPUs, then machines with the same number of other GPUs, then all others. Each
    # group starts with the cheapest.
    offers: tuple[Offer, ...]
    # For each machine with 8 GPUs, the offers of the layouts that fit, the cheapest first. The keys have the form
    # "parallel/tensor_parallel".
    layouts: list[dict[str, Offer]]


def make_estimate(
    run: Run,
    prices: PriceList,
    lengths: Mapping[str, int | None],
    network: Network = ONE_NODE,
    usd: float | None = None,
) -> RunEstimate:
    """Estimate a run on each machine of the price list.

    `lengths` is passed to make_plan, and `usd` is the price per hour of the run's last job. Raises BadInput if no
    machine can train the run, or if the tokens/s in the price list are impossible.
    """
    start_up = start_up_of(run.directory)
    for machine in prices.machines:
        _check_entered(run.model, prices.path, machine)
    offers = [_offer(run, machine, network, lengths, start_up[0]) for machine in prices.machines]
    full_nodes = [machine for machine in prices.machines if machine.gpus == NODE_GPUS]
    layouts = [
        machine_layouts
        for machine in full_nodes
        if (machine_layouts := _layouts(run, machine, network, lengths, start_up[0]))
    ]
    if not any(offer.fits for offer in offers):
        raise BadInput(_describe_too_big(run.model, run.train, offers, layouts))
    if not any(offer.plan for offer in offers):
        raise BadInput(next(offer.problem for offer in offers if offer.problem is not None))
    rate = prices.preemptions_per_hour * network.nodes
    offers += [_on_spot(run, offer, rate) for offer in offers if offer.machine.spot and offer.plan]
    gpus, kind = gpus_by_name(run.directory) or (None, "")

    def order(offer: Offer) -> tuple[bool, bool, float]:
        requested = gpus is not None and offer.machine.gpus == gpus * network.nodes
        return not (requested and offer.machine.gpu.name.startswith(kind)), not requested, offer.usd()

    named_plan = None
    with suppress(BadInput):  # if there are too few micro-batches for these GPUs, the table still has other machines
        ranks = (gpus or run.train.execution.tensor_parallel) * network.nodes
        named_plan = make_plan(run.train, run.model.context_length, ranks, lengths)
    return RunEstimate(
        run=run,
        prices=prices,
        start_up=start_up,
        network=network,
        requested_gpus=gpus and gpus * network.nodes,
        named_plan=named_plan,
        last_job=_last_job(run, lengths, start_up[0], usd),
        offers=tuple(sorted(offers, key=order)),
        layouts=layouts,
    )


def gpus_by_name(run_directory: Path) -> tuple[int, str] | None:
    """Return the number and kind of GPUs in a run directory's name: (8, "a100") for 8xa100.

    Return None if the name has no such part.
    """
    match = re.search(r"(?:^|-)(\d{1,6})x(?!l(?:$|[a-z-]))([a-z]+\d*)", run_directory.resolve().name)
    return (int(match[1]), match[2]) if match and int(match[1]) else None


def _on_spot(run: Run, offer: Offer, per_hour: float) -> Offer:
    """Return an offer at its machine's spot price.

    Training is assumed to stop during every save, so the time is an upper bound.
    """
    assert offer.plan is not None
    optimizer = network_sizes(run.model).state_bytes(run.train.optimization.optimizer, run.model.n_layers)
    preemptions = Preemptions(
        per_hour=per_hour,
        checkpoint_seconds=expected_save_seconds(run.model, optimizer),
        segments=max(1.0, offer.plan.steps / run.train.checkpoints.checkpoint_interval),
    )
    return attrs.evolve(offer, machine=offer.machine.spot or offer.machine, preemptions=preemptions)


def _last_job(
    run: Run, lengths: Mapping[str, int | None], start_up_seconds: float, usd: float | None
) -> tuple[float, float, float | None] | None:
    """Return the newest job's tokens/s, the hours that the run takes at this speed, and the price per hour.

    The result is None if that job logged no speed, or if its settings differ from the current ones. A job without a
    record of its settings was trained by an older version, and is accepted.
    """
    try:
        record = read_record(run.directory)
    except BadInput:  # the record is damaged, so the job's settings are unknown
        return None
    if record is not None and (
        record.unknown.get("model")
        or _speed_settings(record.model, record.train) != _speed_settings(run.model, run.train)
    ):
        return None
    lines = read_counted(run.directory).records
    start = max((number for number, line in enumerate(lines) if event_of(line) == RunEvent.START), default=len(lines))
    speeds = [line[Metric.TOKENS_PER_SECOND] for line in lines[start:] if line.get(Metric.TOKENS_PER_SECOND)]
    ranks: Any = lines[start].get(Detail.WORLD_SIZE) if speeds else None
    with suppress(BadInput):
        if WORLD_SIZE.holds(ranks):
            tokens = _token_equivalents(run.train, make_plan(run.train, run.model.context_length, ranks, lengths))
            seconds = start_up_seconds + tokens / (speed := statistics.median(speeds))
            return speed, seconds / 3600, usd or last_price(lines)
    return None


def _speed_settings(model: ModelConfig, train: TrainConfig) -> list[Any]:
    """Return the settings that determine a run's tokens/s: its network, batch, optimizer and execution."""
    groups = (BatchOptions, ExecutionOptions, MemoryOptions)
    keys = ["optimizer", *(key for group in groups for key in attrs.fields_dict(group))]
    network = {key: value for key, value in attrs.asdict(model).items() if key not in SAME_SPEED}
    settings = train.flat()
    return [network, {key: settings[key] for key in keys}]


def start_up_of(run_directory: Path) -> tuple[float, int]:
    """Return the median seconds of start-up and compilation over the run's jobs, and the number of these jobs.

    If the run has no jobs yet, the seconds are an assumption.
    """
    ledgers = [record[Metric.LEDGER] for record in read_counted(run_directory).records if Metric.LEDGER in record]
    if not ledgers:
        return ASSUMED_START_UP_SECONDS, 0
    return statistics.median(ledger.get("start-up", 0.0) + ledger["compile"] for ledger in ledgers), len(ledgers)


def _check_entered(model: ModelConfig, path: Path, machine: Machine) -> None:
    """Raise BadInput if the price list has tokens/s that the machine's GPUs cannot reach.

    Such a number was measured with another model, or is a typo.
    """
    # The tokens/s that the GPUs would reach if they computed nothing but matrix products, at their peak rate
    limit = machine.gpus * machine.gpu.peak_flops / (6 * matmul_parameter_count(model))
    if machine.tokens_per_second is not None and machine.tokens_per_second > limit:
        raise BadInput(
            f"{path}: {machine.name}: tokens_per_second: got {machine.tokens_per_second:g}, but the peak of "
            f"{machine.gpus} x {machine.gpu.name} allows at most {limit:,.0f} for this model; enter this run's "
            "measured tokens/s, or leave the key out"
        )


def _offer(
    run: Run, node: Machine, network: Network, lengths: Mapping[str, int | None], start_up_seconds: float
) -> Offer:
    """Return the offer for a run on `node` or, if `network` connects several nodes, on several machines like `node`."""
    model, train, tensor_size = run.model, run.train, run.train.execution.tensor_parallel
    machine = node if network.nodes == 1 else node.times(network.nodes)
    memory = MemoryModel.of(model, train, machine.gpus)
    largest = memory.largest_microbatch(gpu_bytes(machine.gpu))
    plan, problem = None, None
    try:
        if node.gpus % tensor_size:
            expected = f"wanted a divisor of {node.gpus}, the machine's number of GPUs"
            raise BadInput(f"tensor_parallel: got {tensor_size}, {expected}")
        smaller = train.replace(microbatch_size=_microbatch(train, machine, largest))
        plan = make_plan(smaller, model.context_length, machine.gpus, lengths)
    except BadInput as error:
        problem = str(error)
    speeds = [] if plan is None else throughputs(model, node, plan.tokens_per_step, train)
    if network.nodes > 1 and plan is not None:
        speeds = [on_network(speed, network, model, plan, train) for speed in speeds]
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


def _layouts(run: Run, machine: Machine, network: Network, *offer_arguments: Any) -> dict[str, Offer]:
    """Return a machine's offers for all layouts that fit, the cheapest first. All throughputs are estimates."""
    offers, unmeasured, execution = {}, attrs.evolve(machine, tokens_per_second=None), run.train.execution
    # On one node, hsdp is the same as fsdp, so hsdp is tried only if the run uses it.
    kinds = sorted({"ddp", "fsdp", "hsdp" if network.nodes > 1 else execution.parallel})
    for tensor_size in sorted({1, 2, 4, NODE_GPUS, execution.tensor_parallel}):
        for kind in kinds if tensor_size in shard_counts(run.model) else ():
            train = run.train.replace(parallel=kind, tensor_parallel=tensor_size, tensor_shards=None)
            offer = _offer(attrs.evolve(run, train=train), unmeasured, network, *offer_arguments)
            if offer.throughputs:
                offers[f"{kind}/{tensor_size}"] = offer
    return dict(sorted(offers.items(), key=lambda layout: layout[1].usd()))


def _token_equivalents(train: TrainConfig, plan: Plan) -> float:
    """Return how many tokens all GPUs together could train on in the time that the run and its validations take.

    Validations run at intervals and before the first step. Each validation is assumed to use all datasets of a mixture.
    The returned number is an upper bound, because a dataset may have no validation tokens.
    """
    trained = plan.train_tokens / balance(plan.layout.microbatches, plan.layout.data_parallel_size)
    interval = train.validation.validation_interval
    if interval is None:
        return trained
    validations = 1 + count_due(1, plan.steps, train.checkpoints.checkpoint_interval, interval)
    sequences = validations * len(plan.sources) * plan.validation_sequences
    return trained + VALIDATION_SHARE * sequences * plan.layout.context_length


def _microbatch(train: TrainConfig, machine: Machine, largest: int | None) -> int:
    """Return the largest micro-batch, up to the run's own, that fits and does not change the global batch.

    Raises BadInput if there is no such micro-batch.
    """
    size, batch = train.batch.microbatch_size, train.batch.global_batch_size
    if largest is None or (batch is None and size > largest):
        raise BadInput(f"micro-batch {size} does not fit; the largest that fits: {largest or 'none'}")
    if batch is None:
        return size
    ranks = machine.gpus // train.execution.tensor_parallel
    sizes = microbatch_sizes(batch, ranks, min(size, largest))
    if not sizes:
        raise BadInput(
            train.located(
                Problem(
                    key="global_batch_size",
                    found=str(batch),
                    expected=f"at least one sequence for each of the {ranks} data-parallel ranks of {machine.name}",
                )
            )
        )
    return sizes[-1]


def _describe_too_big(
    model: ModelConfig, train: TrainConfig, offers: list[Offer], layouts: list[dict[str, Offer]]
) -> str:
    """Return the error message for a run whose micro-batch does not fit on any machine of the price list."""
    size, batch = train.batch.microbatch_size, train.batch.global_batch_size
    least_bytes = min(offer.bytes for offer in offers)
    roomiest = max((offer.machine for offer in offers), key=lambda machine: (gpu_bytes(machine.gpu), machine.gpus))
    best = max(offers, key=lambda offer: offer.largest or 0)
    if best.largest is None:
        advice = "not even 1 fits; " + MemoryModel.of(model, train, roomiest.gpus).remedies(gpu_bytes(roomiest.gpu))
    else:
        ranks = MemoryModel.of(model, train, best.machine.gpus).data_parallel
        fitting = [] if batch is None else microbatch_sizes(batch, ranks, best.largest)
        largest = max(fitting, default=best.largest)
        advice = f"{best.largest} is the largest that fits, on {best.machine.name}: set microbatch_size={largest}"
        advice += "" if fitting or batch is None else ", and a larger global_batch_size"
    cheapest = [next(iter(machine_layouts.items())) for machine_layouts in layouts]
    texts = ", ".join(f"{name} on {offer.machine.name} for ${rough_number(offer.usd())}" for name, offer in cheapest)
    advice += f"; cheapest parallel/tensor_parallel: {texts}" if texts else ""
    return (
        f"{train.file}: microbatch_size: got {size}, too big for every machine: under {train.execution.parallel} it "
        f"needs {least_bytes / GIB:.1f} GiB per GPU, but {roomiest.name} has only "
        f"{gpu_bytes(roomiest.gpu) / GIB:.1f} GiB; {advice}"
    )
