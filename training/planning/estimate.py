"""What a run would take on machines that one does not have: memory, hours, dollars."""

import math

import attrs

from common.errors import BadInput
from training.config.batch_plan import VALIDATION_SHARE, Plan, make_plan
from training.config.train_config import Run
from training.planning.memory_model import GIB, gpu_bytes, largest_microbatch, predict, remedies
from training.planning.price_list import Machine, PriceList
from training.planning.throughput import Throughput, most_tokens_per_second, throughput

START_UP_SECONDS = 120.0  # a guess: downloading and reading 20 GB of tokens, compiling; not of the machine's own boot


@attrs.frozen(kw_only=True)
class Offer:
    """A run on a machine."""

    machine: Machine
    plan: Plan | None  # with the run's micro-batch, or a smaller one; None: `problem` says why there is none
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
    for machine in prices.machines:
        _check_entered(run, prices, machine)
    offers = [_offer(run, machine, lengths) for machine in prices.machines]
    if not any(offer.fits for offer in offers):
        raise BadInput(_too_big(run, offers))
    if not any(offer.plan for offer in offers):
        raise BadInput(next(offer.problem for offer in offers if offer.problem is not None))
    return offers


def run_seconds(run: Run, plan: Plan, tokens_per_second: float) -> float:
    """Return the wall clock of a whole run: training, validation on all GPUs, start-up; saves are written behind it."""
    validated_tokens = _validations(run, plan.steps) * plan.validation_sequences * plan.layout.context_length
    tokens = plan.train_tokens + VALIDATION_SHARE * validated_tokens
    return START_UP_SECONDS + tokens / tokens_per_second


def _validations(run: Run, steps: int) -> int:
    """Return how often a run validates: before the first step and after the last, at either interval between them."""
    validation, checkpoint, between = (
        run.train.validation.validation_interval,
        run.train.checkpoints.checkpoint_interval,
        steps - 1,
    )
    if validation is None:
        return 0
    both = between // math.lcm(validation, checkpoint)
    return 2 + between // validation + between // checkpoint - both


def _check_entered(run: Run, prices: PriceList, machine: Machine) -> None:
    """Raise BadInput for tokens/s that the machine's GPUs cannot reach: of another model, or mistyped."""
    most = machine.gpus * most_tokens_per_second(run.model, machine.gpu)
    if machine.tokens_per_second is not None and machine.tokens_per_second > most:
        raise BadInput(
            f"{prices.path}: {machine.name}: tokens_per_second: got {machine.tokens_per_second:g}, more than the "
            f"{most:,.0f} that the peak of {machine.gpus} x {machine.gpu.name} allows for this model; enter what this "
            "run has been measured at, or leave it out"
        )


def _offer(run: Run, machine: Machine, lengths: dict[str, int | None]) -> Offer:
    shape = (run.model, run.train.execution.parallel, machine.gpus)
    largest = largest_microbatch(*shape, gpu_bytes(machine.gpu), run.train.thrift)
    plan, problem = None, None
    try:
        size = _microbatch(run, machine, largest)
        plan = make_plan(attrs.evolve(run, train=run.train.replace(microbatch_size=size)), machine.gpus, lengths)
    except BadInput as error:
        problem = str(error)
    return Offer(
        machine=machine,
        plan=plan,
        problem=problem,
        largest=largest,
        bytes=predict(*shape, run.train.batch.microbatch_size, run.train.thrift).total,
        throughput=throughput(run.model, machine),
    )


def _microbatch(run: Run, machine: Machine, largest: int | None) -> int:
    """Return the run's micro-batch, or the largest smaller one that fits and keeps the batch. Raises BadInput."""
    size, batch = run.train.batch.microbatch_size, run.train.batch.global_batch_size
    if largest is None or (batch is None and size > largest):
        raise BadInput(f"micro-batch {size} does not fit; the largest that does: {largest or 'none'}")
    if batch is None:
        return size
    sizes = _dividing(batch, machine.gpus, min(size, largest))
    if not sizes:
        raise BadInput(
            f"{run.directory / 'train.json'}: global_batch_size: got {batch}, which the {machine.gpus} GPUs of "
            f"{machine.name} do not divide"
        )
    return sizes[-1]


def _dividing(batch: int, gpus: int, largest: int) -> list[int]:
    """Return the micro-batches up to `largest` with which so many GPUs make up the global batch."""
    return [size for size in range(1, largest + 1) if batch % (size * gpus) == 0]


def _too_big(run: Run, offers: list[Offer]) -> str:
    """Return one line that says why the run fits on no machine, and what would fit."""
    size, kind, batch = run.train.batch.microbatch_size, run.train.execution.parallel, run.train.batch.global_batch_size
    roomiest = max(offers, key=lambda offer: gpu_bytes(offer.machine.gpu))
    room = f"{gpu_bytes(roomiest.machine.gpu) / GIB:.1f} GiB of {roomiest.machine.name}"
    if any(offer.largest is not None for offer in offers):
        best = max(offers, key=lambda offer: offer.largest or 0)
        most = best.largest or 1
        fitting = [most] if batch is None else _dividing(batch, best.machine.gpus, most)
        advice = f"microbatch_size={fitting[-1]}" if fitting else "it, and a global_batch_size that its GPUs divide"
        least = min(offer.bytes for offer in offers) / GIB
        return (
            f"{run.directory / 'train.json'}: microbatch_size: got {size}, which needs {least:.1f} GiB of a GPU, more "
            f"than the {room}; the largest that fits is {best.largest}, on {best.machine.name}: set {advice}"
        )
    needs = min(predict(run.model, kind, offer.machine.gpus, 1, run.train.thrift).total for offer in offers) / GIB
    advice = remedies(
        run.model, kind, roomiest.machine.gpus, gpu_bytes(roomiest.machine.gpu), muon=run.train.thrift.muon
    )
    return (
        f"{run.directory / 'model.json'}: too big for every machine: under {kind} one sequence needs {needs:.1f} GiB "
        f"of a GPU, more than the {room}; {advice}"
    )
