"""Mixing laws on simulated losses: how often the intervals hold a planted optimum, and how often a gain is false."""

import bench  # first: it makes the repository's modules importable
import numpy as np

from experiments.mixture.mixing_law import optima
from experiments.mixture.mixture_file import PARTS
from experiments.mixture.mixture_table import check_held_out, find_optimum


def main(*, simulations: int = 400, sources: int = 3, runs: int = 16, noise: float = 0.02, seed: int = 0) -> None:
    """Print a row for planted laws and one for losses that no weight changes; `noise`: of a loss, nats per token."""
    random = np.random.default_rng(seed)
    rows = []
    for name in ("an optimum", "nothing"):
        inside, gains, refused, width = 0, 0, 0, 0.0
        for _ in range(simulations):
            worth = random.uniform(0.02, 0.5, (sources, sources))  # each source helps a domain of its own most
            worth[np.diag_indices(sources)] = 1
            if name == "nothing":
                worth[:] = 1
            exponents, floors = random.uniform(0.1, 1.0, sources), random.uniform(1.0, 2.0, sources)
            (best,) = optima(worth[None], exponents[None], np.ones(sources))
            parts = np.round(PARTS * random.dirichlet(np.ones(sources), runs))
            parts[0], parts[1 : sources + 1] = 1, np.eye(sources)
            weights = parts / parts.sum(1, keepdims=True)
            losses = floors + (weights @ worth.T) ** -exponents + noise * random.standard_normal((runs, sources))
            refused += check_held_out(weights, losses)[0] > 0
            found, (gain, _) = find_optimum(weights, losses, np.full(sources, 1 / sources))
            ends = np.array([[one.low, one.high] for one in found])
            inside += bool(((ends[:, 0] <= best) & (best <= ends[:, 1])).all())
            gains += gain.low is not None and gain.low > 0
            width += float(np.diff(ends).mean()) / simulations
        held = f"{inside / simulations:.1%}" if name != "nothing" else "-"
        rows.append([name, held, f"{width:.2f}", f"{gains / simulations:.1%}", f"{refused / simulations:.1%}"])
    print(bench.table(["planted", "optimum in its 90 % interval", "mean width", "gain found", "refused"], rows))


if __name__ == "__main__":
    bench.run(main)
