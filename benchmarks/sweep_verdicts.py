"""Verdicts of sweeps on simulated losses: how often they are wrong, and how often they find a planted difference."""

import bench  # imported first, because it makes the repository's modules importable
import numpy as np
import numpy.typing as npt

from evaluation.shared.significance import default_seeds
from experiments.sweep.sweep_file import Halving
from experiments.sweep.sweep_table import compare_with_base

# The unit of the losses is the standard deviation of the noise that each run has on its own.
SHARED = 2.0  # standard deviation of the part of the loss that all variants with the same seed have in common
EFFECT = 3.0  # planted difference


def main(*, sweeps: int = 100_000) -> None:
    """Print the two tables. The number after ± is the standard error of the simulation."""
    random = np.random.default_rng(0)
    rows = []
    for name, levers, seeds, kind in nulls():
        share = false_share(kind, levers, seeds, sweeps, random)
        rows.append([name, str(levers), str(seeds), percent(share, sweeps)])
    print(bench.table(["no differences", "levers", "seeds", "sweeps with a false difference"], rows))
    rows = []
    for levers in (1, 2, 3, 5):
        for seeds in sorted({3, 5, default_seeds(levers)}):
            share = detected_share(levers, seeds, sweeps, random)
            remark = "the default" if seeds == default_seeds(levers) else ""
            rows.append([f"one of {EFFECT:g} deviations", str(levers), str(seeds), percent(share, sweeps), remark])
    print()
    print(bench.table(["planted", "levers", "seeds", "found", ""], rows))


def nulls() -> list[tuple[str, int, int, str]]:
    """Return the cases. Each has a name, a number of levers, a number of seeds, and a kind of losses."""
    kinds = {
        "normal": "equal variances",
        "heavy": "Student's t, 3 degrees of freedom",
        "lever x3": "one lever with 3 times the noise",
        "lever x10": "one lever with 10 times the noise",
        "base x3": "the base with 3 times the noise",
        "base x10": "the base with 10 times the noise",
        "rare": "all worse by 3 deviations in 1 run of 10",
        "rare lever": "one lever worse by 9 in 1 run of 10, otherwise better by 1",
        "halved": "equal variances, halving by a loss with correlation 0.7",
    }
    return [(kinds[kind], levers, seeds, kind) for kind in kinds for levers in (1, 2, 5) for seeds in (3, 5)]


def losses(kind: str, levers: int, seeds: int, sweeps: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return losses (sweeps, variants, seeds). The first variant is the base, and the levers have no effect."""
    shape = (sweeps, levers + 1, seeds)
    noise = random.standard_t(3, shape) if kind == "heavy" else random.standard_normal(shape)
    if kind == "rare":
        noise += 3.0 * (random.random(shape) < 0.1)
    if kind == "rare lever":
        noise[:, 1] += np.where(random.random(shape[::2]) < 0.1, 9.0, -1.0)
        noise *= 0.5
    scale = np.ones((levers + 1, 1))
    unstable, separator, factor = kind.partition(" x")
    if separator:
        scale[0 if unstable == "base" else 1] = float(factor)
    return noise * scale + SHARED * random.standard_normal((sweeps, 1, seeds))


def false_share(kind: str, levers: int, seeds: int, sweeps: int, random: np.random.Generator) -> float:
    """Return the share of sweeps in which any lever is called better or worse."""
    final = losses(kind, levers, seeds, sweeps, random)
    early = 0.7 * (final - final.mean(axis=1, keepdims=True))
    early += np.sqrt(1 - 0.7**2) * random.standard_normal(final.shape)
    return float(
        np.mean(
            [
                significant(halve(sweep, rung) if kind == "halved" else sweep, levers).any()
                for sweep, rung in zip(final, early, strict=True)
            ]
        )
    )


def halve(sweep: npt.NDArray[np.float64], rung: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the final losses of the base and of the better half of the levers, judged by their losses at the rung."""
    means = {str(index): float(rung[index].mean()) for index in range(1, len(sweep))}
    losers = Halving(factor=2, rungs=(0.5,)).losers(means)
    return sweep[[index for index in range(len(sweep)) if str(index) not in losers]]


def significant(sweep: npt.NDArray[np.float64], comparisons: int) -> npt.NDArray[np.bool_]:
    """Return a boolean for each lever: true if the sweep calls the lever better or worse than the base."""
    base, *levers = [dict(enumerate(runs.tolist())) for runs in sweep]
    return np.array([difference.excludes_zero for difference, _ in compare_with_base(base, levers, comparisons)])


def detected_share(levers: int, seeds: int, sweeps: int, random: np.random.Generator) -> float:
    """Return the share of sweeps in which the first lever, which has a lower loss, is called better."""
    final = losses("normal", levers, seeds, sweeps, random)
    final[:, 1] -= EFFECT
    return float(np.mean([significant(sweep, levers)[0] for sweep in final]))


def percent(share: float, sweeps: int) -> str:
    return f"{share:.2%} ± {np.sqrt(share * (1 - share) / sweeps):.2%}"


if __name__ == "__main__":
    bench.run(main)
