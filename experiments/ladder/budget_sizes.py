"""Best size for a budget: of a family of shapes, the one whose loss is lowest on the tokens that the money buys."""

import math
from collections.abc import Sequence

import attrs
import numpy as np

from common.errors import BadInput
from evaluation.shared.significance import Interval
from experiments.ladder.forecast import MOST_EXTRAPOLATION, describe_extrapolation
from experiments.ladder.loss_law import LawFit
from model.config import ModelConfig
from model.counts import matmul_parameter_count
from training.config.train_config import Run, TrainConfig
from training.data.locate_tokens import lengths_at_hand
from training.planning.estimate import ASSUMED_START_UP_SECONDS
from training.planning.estimate_table import ESTIMATE_CAUTION
from training.planning.memory_model import MemoryModel, gpu_bytes
from training.planning.price_list import Machine, PriceList
from training.planning.throughput import roofline, throughputs

BEYOND = 8  # widest shape of a family over the ladder's widest


@attrs.frozen
class MachineSpeed:
    """Tokens per second of a machine by shape: a roofline, at the target's measured share of it where there is one."""

    machine: Machine
    share: float
    source: str
    measured: bool

    @classmethod
    def of(cls, target: ModelConfig, machine: Machine) -> "MachineSpeed":
        speed = throughputs(target, machine)[0]
        if not speed.measured:
            return cls(machine, 1.0, speed.source, measured=False)
        share = speed.tokens_per_second / (machine.gpus * roofline(target, machine.gpu))
        return cls(machine, share, f"roofline x {share:.2f}, for the target: {speed.source}", measured=True)

    def tokens_per_second(self, model: ModelConfig) -> float:
        return self.share * self.machine.gpus * roofline(model, self.machine.gpu)


@attrs.frozen(kw_only=True)
class BudgetChoice:
    """The best size for a budget on one machine."""

    machine: Machine
    model: ModelConfig
    tokens: int
    hours: float
    speed: MachineSpeed
    loss: Interval
    limits: tuple[str, ...]  # of the ladder or the family, that it lies at or beyond


def size_family(models: Sequence[ModelConfig]) -> list[ModelConfig]:
    """Return shapes from a ladder's narrowest network to BEYOND times its widest, by the ladder's own rule.

    The rule: head width, MLP width over C and query heads per key-value head of the largest, layers as the power of C
    that fits the ladder's networks.
    """
    largest = max(models, key=matmul_parameter_count)
    head, widths = largest.head_width, [model.emb_dim for model in models]
    if len(set(widths)) > 1:
        power, factor = np.polyfit(np.log(widths), np.log([model.n_layers for model in models]), 1)
    else:
        power, factor = 0.0, math.log(largest.n_layers)
    group = largest.n_heads // largest.kv_heads
    step = max(1, min(widths) // (4 * head)) * group  # heads
    family = []
    for heads in range(-(-min(widths) // head // step) * step, BEYOND * max(widths) // head + 1, step):
        width = heads * head
        mlp = None if largest.mlp_width is None else round(largest.mlp_width * width / largest.emb_dim)
        family.append(
            attrs.evolve(
                largest,
                emb_dim=width,
                n_heads=heads,
                n_kv_heads=None if largest.n_kv_heads is None else heads // group,
                n_layers=max(1, round(math.exp(factor + power * math.log(width)))),
                mlp_width=mlp,
            )
        )
    return family


def best_sizes(
    fit: LawFit, shapes: Sequence[ModelConfig], target: Run, usd: float, prices: PriceList
) -> list[BudgetChoice]:
    """Return the best shape for each machine that can train one, the lowest loss first. Raises BadInput for none.

    Of the budget's hours the assumed start-up is taken off; validation is not. No run has more tokens than are at hand,
    in `max_epochs` epochs.
    """
    speeds = [MachineSpeed.of(target.model, machine) for machine in prices.machines]
    choices = [_best_on(speed, fit, shapes, target.train, usd) for speed in speeds]
    found = [choice for choice in choices if choice is not None]
    if not found:
        raise BadInput(f"${usd:,.2f}: not enough for the start-up of any machine of {prices.path}; raise the budget")
    return sorted(found, key=lambda choice: choice.loss.value)


def tokens_at_hand(train: TrainConfig) -> int | None:
    """Return the most tokens that a run may read of its datasets; None where one is not here."""
    lengths = [*lengths_at_hand(train, None).values()]
    return None if None in lengths else train.data.max_epochs * sum(length for length in lengths if length)


def describe_choices(usd: float, choices: Sequence[BudgetChoice]) -> list[str]:
    """Return the best size for a budget as lines, the best machine first."""
    lines = []
    for index, choice in enumerate(choices):
        model = choice.model
        lines.append(
            f"{f'${usd:,.2f}' if index == 0 else 'or':<12} {model.n_layers} layers x {model.emb_dim}, N "
            f"{matmul_parameter_count(model):,}, on {choice.tokens:,} tokens: loss {choice.loss.text(4)}; "
            f"{choice.machine.name}, {choice.hours:.2f} hours at {choice.speed.tokens_per_second(model):,.0f} tokens/s "
            f"({choice.speed.source})"
        )
        lines += [f"             {limit}" for limit in choice.limits]
    return lines if all(choice.speed.measured for choice in choices) else [*lines, ESTIMATE_CAUTION]


def _best_on(
    speed: MachineSpeed, fit: LawFit, shapes: Sequence[ModelConfig], train: TrainConfig, usd: float
) -> BudgetChoice | None:
    machine = speed.machine
    seconds = 3600 * usd / machine.usd_per_hour - ASSUMED_START_UP_SECONDS
    if seconds <= 0:
        return None
    candidates, most = [], tokens_at_hand(train)
    for model in shapes:
        tokens = int(seconds * speed.tokens_per_second(model))
        tokens = tokens if most is None else min(tokens, most)
        candidates.append((fit.predict(matmul_parameter_count(model), tokens), model, tokens))
    for loss, model, tokens in sorted(candidates, key=lambda candidate: candidate[0].value):
        if MemoryModel.of(model, train, machine.gpus).largest_microbatch(gpu_bytes(machine.gpu)) is None:
            continue
        hours = (tokens / speed.tokens_per_second(model) + ASSUMED_START_UP_SECONDS) / 3600
        limits = (*_limits(fit, shapes, model, tokens), *_data_limits(train, tokens, most))
        return BudgetChoice(
            machine=machine, model=model, tokens=tokens, hours=hours, speed=speed, loss=loss, limits=limits
        )
    return None


def _limits(fit: LawFit, shapes: Sequence[ModelConfig], model: ModelConfig, tokens: int) -> tuple[str, ...]:
    """Return where a choice lies at the edge of the family, or beyond what the ladder supports."""
    size, limits = matmul_parameter_count(model), []
    searched = [matmul_parameter_count(shape) for shape in shapes]
    for edge, word in ((min(searched), "smaller"), (max(searched), "larger")):
        if size == edge:
            limits.append(f"at the edge of the sizes searched: a {word} one may be better")
    extrapolation = size * tokens / fit.compute
    if extrapolation > MOST_EXTRAPOLATION:
        limits.append(f"{describe_extrapolation(extrapolation)}: extend the ladder")
    ratios = [point.tokens / point.parameters for point in fit.points]
    if not min(ratios) <= tokens / size <= max(ratios):
        limits.append(
            f"{tokens / size:.3g} tokens per parameter, the ladder has {min(ratios):.3g} to {max(ratios):.3g}: add a "
            "horizon"
        )
    return tuple(limits)


def _data_limits(train: TrainConfig, tokens: int, most: int | None) -> list[str]:
    """Return where the tokens at hand limit a choice, or are not known."""
    if most is None:
        return [f"needs {tokens:,} train tokens: whether the dataset holds as many is not known here"]
    epochs = f"{train.data.max_epochs} epoch{'s' if train.data.max_epochs > 1 else ''} of the tokens at hand"
    return [f"all of {epochs}: prepare more, or raise max_epochs"] if tokens == most else []
