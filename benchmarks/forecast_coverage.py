"""Coverage of a ladder's 90% intervals: how often the interval contains the loss of a simulated run of the target.

python benchmarks/forecast_coverage.py [--simulations 200]

Each simulation draws the noise, its correlation among the horizons of a trunk, and the target's compute. It fits the
law to the ladder's noisy losses, and records whether the target's loss, which has independent noise, is inside the
interval.
"""

import math
from collections.abc import Callable, Iterable
from itertools import product

import attrs
import bench
import numpy as np

from experiments.ladder.loss_law import LossPoint, fit_law, hold_out_largest, refusal

SMALLEST = 1e7  # parameters
NOISES, SHARED, FACTORS = (0.002, 0.005, 0.01, 0.0133), (0.0, 0.5, 0.8, 0.95), (3, 10, 30)
CENTER = (3e7, 3e8)  # an N and a D; `size_part` and `token_part` of `_exact` are the law's two terms at this point


@attrs.frozen
class LadderShape:
    """The sizes, horizons and seeds of a ladder."""

    sizes: int
    span: float  # ratio of the largest size to the smallest
    horizons: tuple[int, ...] = (5, 10, 20)  # tokens per parameter
    seeds: int = 1


SHAPES = {
    "3 sizes": LadderShape(3, 8),
    "4 sizes": LadderShape(4, 16),
    "5 sizes": LadderShape(5, 32),
    "4 sizes, 2 horizons, 3 seeds": LadderShape(4, 5, (16, 32), 3),  # ladders/laptop.json
}
Truth = Callable[[float, float], float]


def law(*, floor: float, size_factor: float, alpha: float, token_factor: float, beta: float) -> Truth:
    """Return a law as a function: L = floor + size_factor / N ** alpha + token_factor / D ** beta."""
    return lambda size, tokens: floor + size_factor / size**alpha + token_factor / tokens**beta


def _exact(floor: float, size_part: float, alpha: float, token_part: float, beta: float) -> Truth:
    size_factor, token_factor = size_part * CENTER[0] ** alpha, token_part * CENTER[1] ** beta
    return law(floor=floor, size_factor=size_factor, alpha=alpha, token_factor=token_factor, beta=beta)


HOFFMANN = law(floor=1.69, size_factor=406.4, alpha=0.34, token_factor=410.7, beta=0.28)
BESIROGLU = law(floor=1.8172, size_factor=482.01, alpha=0.3478, token_factor=2085.43, beta=0.3658)
EXACT: dict[str, Truth] = {
    "Hoffmann et al.": HOFFMANN,
    "Besiroglu et al.": BESIROGLU,
    "steep, 0.5 and 0.5": _exact(0.6, 0.45, 0.5, 0.65, 0.5),
    "shallow, 0.25 and 0.25": _exact(1.2, 1.2, 0.25, 1.4, 0.25),
    "more by tokens, 0.45 and 0.3": _exact(2.2, 0.3, 0.45, 1.1, 0.3),
    "more by size, 0.3 and 0.45": _exact(2.2, 0.9, 0.3, 0.4, 0.45),
}
MISSPECIFIED: dict[str, Truth] = {
    # Kaplan et al. 2020, arXiv 2001.08361, equation 1.5, with an added floor.
    "coupled": lambda size, tokens: 1.69 + ((406.4 / size**0.34) ** (1 / 0.28) + 410.7 ** (1 / 0.28) / tokens) ** 0.28,
    "0.3% worse per decade of size": lambda size, tokens: (
        HOFFMANN(size, tokens) * (1 + 0.003 * math.log10(size / SMALLEST))
    ),
    "smallest 0.2% off": lambda size, tokens: HOFFMANN(size, tokens) * (1 + 0.004 * math.exp(-size / 1.5e7)),
    "off 20 tokens per parameter": lambda size, tokens: (
        HOFFMANN(size, tokens) + 0.02 * math.log10(tokens / size / 20) ** 2
    ),
}
# The law of Kaplan et al., table 1, written as a sum. Its exponents are below those that the prior allows.
OUTSIDE: dict[str, Truth] = {"no floor, 0.076 and 0.095": lambda n, d: (8.8e13 / n) ** 0.076 + (5.4e13 / d) ** 0.095}
HEADS = ["ladders", "simulations", "in the interval", "width", "error", "refused", "in the interval if not refused"]
GROUPS = {"exact law": EXACT, "mildly misspecified": MISSPECIFIED, "outside of the prior": OUTSIDE}


@attrs.frozen(kw_only=True)
class Simulation:
    """One ladder, and one new run of its target."""

    group: str
    shape: str
    inside: bool  # whether the run's loss is inside the interval
    width: float  # width of the interval, as a share of the loss
    error: float  # error of the predicted loss, as a share of the loss
    refused: bool  # whether the rules refuse a forecast


def main(*, simulations: int = 200) -> None:
    """Print the coverage, the median width and the root mean square error, by group and shape of the ladder."""
    finished = [
        simulate(group, truth, shape, seed)
        for group, truths in GROUPS.items()
        for truth in truths
        for shape in SHAPES
        for seed in range(simulations)
    ]
    rows = [
        _row(
            f"{group}, {shape}",
            (simulation for simulation in finished if simulation.group == group and simulation.shape == shape),
        )
        for group in GROUPS
        for shape in SHAPES
    ]
    print(bench.table(HEADS, rows))


def simulate(group: str, truth: str, name: str, seed: int) -> Simulation:
    """Simulate one ladder."""
    shape = SHAPES[name]
    generator = np.random.default_rng([shape.sizes, len(shape.horizons), seed, *truth.encode()])
    noise, shared = float(generator.choice(NOISES)), float(generator.choice(SHARED))
    factor, loss = int(generator.choice(FACTORS)), GROUPS[group][truth]
    points = ladder(loss, shape, noise, shared, generator)
    size = points[-1].parameters * math.sqrt(factor)
    tokens = shape.horizons[-1] * size
    measured = loss(size, tokens) * (1 + noise * generator.standard_normal())
    fit = fit_law(points)
    forecast = fit.predict(size, tokens)
    assert forecast.low is not None and forecast.high is not None
    return Simulation(
        group=group,
        shape=name,
        inside=forecast.low <= measured <= forecast.high,
        width=(forecast.high - forecast.low) / measured,
        error=forecast.value / measured - 1,
        refused=refusal(hold_out_largest(points), fit) is not None,
    )


def ladder(
    loss: Truth, shape: LadderShape, noise: float, shared: float, generator: np.random.Generator
) -> list[LossPoint]:
    """Return the points of one ladder.

    The horizons of a trunk have a part of the noise in common; `shared` is this part's share of the variance.
    """
    points = []
    sizes = np.geomspace(SMALLEST, SMALLEST * shape.span, shape.sizes).round().tolist()
    for size, seed in product(sizes, range(shape.seeds)):
        common = generator.standard_normal()
        for ratio in shape.horizons:
            independent = generator.standard_normal()
            error = noise * (math.sqrt(shared) * common + math.sqrt(1 - shared) * independent)
            points.append(
                LossPoint(
                    rung=f"{size:.0f}",
                    parameters=int(size),
                    tokens=int(ratio * size),
                    loss=loss(size, ratio * size) * (1 + error),
                    seed=seed,
                )
            )
    return points


def _row(name: str, simulations: Iterable[Simulation]) -> list[str]:
    group = list(simulations)
    forecasts = [simulation for simulation in group if not simulation.refused]
    error = math.sqrt(sum(simulation.error**2 for simulation in group) / len(group))
    width = float(np.median([simulation.width for simulation in group]))
    refused = f"{100 * (1 - len(forecasts) / len(group)):.0f}%"
    coverage = [_coverage(group), _coverage(forecasts)]
    return [name, str(len(group)), coverage[0], f"{100 * width:.1f}%", f"{100 * error:.1f}%", refused, coverage[1]]


def _coverage(simulations: list[Simulation]) -> str:
    if not simulations:
        return ""
    inside = sum(simulation.inside for simulation in simulations) / len(simulations)
    return f"{100 * inside:.1f} ± {100 * math.sqrt(inside * (1 - inside) / len(simulations)):.1f}%"


if __name__ == "__main__":
    bench.run(main)
