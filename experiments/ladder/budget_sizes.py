"""Best size for a budget: of a family of shapes, the one whose loss is lowest on the tokens that the money buys."""

import math
from collections.abc import Sequence

import attrs
import numpy as np

from evaluation.shared.significance import Interval
from experiments.ladder.forecast import MOST_EXTRAPOLATION, describe_extrapolation
from experiments.ladder.loss_law import LawFit
from model.config import ModelConfig
from model.counts import matmul_parameter_count
from training.config.train_config import Run
from training.data.locate_tokens import lengths_at_hand
from training.planning.estimate import ASSUMED_START_UP_SECONDS
from training.planning.estimate_table import ESTIMATE_CAUTION
from training.planning.memory_model import MemoryModel, gpu_bytes
from training.planning.price_list import Machine, PriceList
from training.planning.throughput import roofline, throughputs

BEYOND = 8  # widest shape of a family over the ladder's widest


@attrs.frozen(kw_only=True)
class BudgetChoice:
    """The best size for a budget on one machine."""

    machine: Machine
    model: ModelConfig
    tokens: int
    tokens_per_second: float  # by a roofline, at the target's measured share of it where there is one
    source: str  # of tokens/s
    loss: Interval
    limits: list[str]  # of the ladder, the family or the data, that it lies at or beyond

    @property
    def hours(self) -> float:
        """Duration with the start-up, without validation."""
        return (self.tokens / self.tokens_per_second + ASSUMED_START_UP_SECONDS) / 3600


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
    """Return the best shape for each machine that can train one, the lowest loss first.

    Of the budget's hours the assumed start-up is taken off; validation is not. No run has more tokens than are at hand,
    in `max_epochs` epochs.
    """
    choices = [_best_on(machine, fit, shapes, target, usd) for machine in prices.machines]
    return sorted((choice for choice in choices if choice is not None), key=lambda choice: choice.loss.value)


def describe_best_sizes(
    fit: LawFit, shapes: Sequence[ModelConfig], target: Run, usd: float, prices: PriceList
) -> list[str]:
    """Return the best size for a budget as lines, the best machine first."""
    choices = best_sizes(fit, shapes, target, usd, prices)
    if not choices:
        return [f"${usd:,.2f}: not enough for the start-up of any machine of {prices.path}; raise the budget"]
    lines = []
    for index, choice in enumerate(choices):
        model = choice.model
        lines.append(
            f"{f'${usd:,.2f}' if index == 0 else 'or':<12} {model.n_layers} layers x {model.emb_dim}, N "
            f"{matmul_parameter_count(model):,}, on {choice.tokens:,} tokens: loss {choice.loss.text(4)}; "
            f"{choice.machine.name}, {choice.hours:.2f} hours at {choice.tokens_per_second:,.0f} tokens/s "
            f"({choice.source})"
        )
        lines += [f"             {limit}" for limit in choice.limits]
    return [*lines, ESTIMATE_CAUTION]


def _best_on(
    machine: Machine, fit: LawFit, shapes: Sequence[ModelConfig], target: Run, usd: float
) -> BudgetChoice | None:
    seconds = 3600 * usd / machine.usd_per_hour - ASSUMED_START_UP_SECONDS
    if seconds <= 0:
        return None
    lengths = [*lengths_at_hand(target.train, None).values()]
    at_hand = None if None in lengths else target.train.data.max_epochs * sum(length or 0 for length in lengths)
    speed, share = throughputs(target.model, machine)[0], float(machine.gpus)
    source = speed.source
    if speed.measured:
        share = speed.tokens_per_second / roofline(target.model, machine.gpu)
        source = f"roofline x {share / machine.gpus:.2f}, for the target: {speed.source}"
    candidates = []
    for model in shapes:
        tokens_per_second = share * roofline(model, machine.gpu)
        tokens = int(seconds * tokens_per_second)
        tokens = tokens if at_hand is None else min(tokens, at_hand)
        candidates.append((fit.predict(matmul_parameter_count(model), tokens), model, tokens, tokens_per_second))
    for loss, model, tokens, tokens_per_second in sorted(candidates, key=lambda candidate: candidate[0].value):
        if MemoryModel.of(model, target.train, machine.gpus).largest_microbatch(gpu_bytes(machine.gpu)) is not None:
            return BudgetChoice(
                machine=machine,
                model=model,
                tokens=tokens,
                tokens_per_second=tokens_per_second,
                source=source,
                loss=loss,
                limits=_limits(fit, shapes, model, tokens, at_hand),
            )
    return None


def _limits(
    fit: LawFit, shapes: Sequence[ModelConfig], model: ModelConfig, tokens: int, at_hand: int | None
) -> list[str]:
    """Return where a choice lies at the edge of the family or of the tokens, or beyond what the ladder supports."""
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
    if at_hand is None:
        limits.append(f"needs {tokens:,} train tokens: whether the dataset holds as many is not known here")
    elif tokens == at_hand:
        limits.append("all of the tokens at hand in max_epochs epochs: prepare more, or raise max_epochs")
    return limits
