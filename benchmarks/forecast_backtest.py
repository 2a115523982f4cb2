"""Back-test of the loss law on published series: fitted to the small runs, compared with the large ones.

python benchmarks/forecast_backtest.py

Prints for each series the verdict of the held-out rule, and for each larger run the forecast, its 90 % interval and the
published loss. Forecasts are printed also where the rule would have refused them.
"""

import attrs
import command

from common.errors import BadInput
from experiments.ladder.loss_law import LossPoint, fit_law, hold_out_largest, refusal
from model.config import GPT2_SIZES, GPT2_SMALL, matmul_parameter_count


@attrs.frozen(kw_only=True)
class PublishedSeries:
    """Runs of one recipe, as published."""

    name: str
    source: str
    fitted: list[LossPoint]
    targets: list[LossPoint]


def _point(rung: str, parameters: float, tokens: float, loss: float) -> LossPoint:
    return LossPoint(rung=rung, parameters=round(parameters), tokens=round(tokens), loss=loss)


NANOCHAT = PublishedSeries(
    name="nanochat, optima of four budgets; bits per byte",
    source="karpathy/nanochat: dev/LOG.md, four optima of 1e18 to 1e19 FLOPs from quadratic fits, matrices and head; "
    "dev/LEADERBOARD.md, runs 1 and 2 (steps x 524,288 tokens; the later one in fp8)",
    fitted=[
        _point("1e18", 110_678_115, 1_241_505_403, 0.8972),
        _point("2e18", 167_797_457, 1_785_336_422, 0.8616),
        _point("5e18", 250_650_865, 2_642_234_152, 0.8293),
        _point("1e19", 381_758_347, 3_806_871_243, 0.7999),
    ],
    targets=[
        _point("d24", 12 * 24 * 1536**2 + 32768 * 1536, 16704 * 524_288, 0.74833),
        _point("d26, fp8", 12 * 26 * 1664**2 + 32768 * 1664, 14889 * 524_288, 0.745036),
    ],
)


def _cerebras(name: str, layers: int, width: int, tokens: float, loss: float) -> LossPoint:
    shape = attrs.evolve(GPT2_SMALL, n_layers=layers, emb_dim=width, n_heads=1)
    return _point(name, matmul_parameter_count(shape), tokens, loss)


CEREBRAS = PublishedSeries(
    name="Cerebras-GPT; nats per token of the Pile",
    source="Dey et al. 2023, arXiv 2304.03208, table 1: one horizon each, about 20 tokens per parameter; rates and "
    "batches chosen by hand for each size",
    fitted=[
        _cerebras("111M", 10, 768, 2.22e9, 2.608),
        _cerebras("256M", 14, 1088, 5.12e9, 2.349),
        _cerebras("590M", 18, 1536, 1.18e10, 2.181),
        _cerebras("1.3B", 24, 2048, 2.63e10, 1.997),
        _cerebras("2.7B", 32, 2560, 5.30e10, 1.834),
    ],
    targets=[_cerebras("6.7B", 32, 4096, 1.332e11, 1.704), _cerebras("13B", 40, 5120, 2.571e11, 1.572)],
)
CHINCHILLA_RUNS = {  # millions of parameters, as the paper counts them: billions of tokens, loss
    74: [(3.15, 3.406), (6.53, 3.222), (11.89, 3.108)],
    140: [(4.07, 3.132), (8.15, 3.012), (16.38, 2.906)],
    278: [(5.48, 2.941), (10.96, 2.812), (21.41, 2.712)],
    552: [(8.33, 2.745), (16.13, 2.640), (24.90, 2.585)],
    1143: [(16.37, 2.517), (32.77, 2.446)],
    2639: [(36.64, 2.349), (61.70, 2.286)],
    6796: [(38.74, 2.293), (78.99, 2.206)],
}
_CHINCHILLA_POINTS = [
    _point(f"{size}M", size * 1e6, tokens * 1e9, loss)
    for size, runs in CHINCHILLA_RUNS.items()
    for tokens, loss in runs
]
CHINCHILLA = PublishedSeries(
    name="Chinchilla, four sizes x three horizons; nats per token",
    source="Hoffmann et al. 2022, arXiv 2203.15556, figure 4, as epoch-research/analyzing-chinchilla read it: losses "
    "from colors, in steps of 0.3 to 0.4 %; three horizons chosen of each",
    fitted=[point for point in _CHINCHILLA_POINTS if point.parameters < 6e8],
    targets=[point for point in _CHINCHILLA_POINTS if point.parameters > 6e8],
)
LLM_C = PublishedSeries(
    name="llm.c, GPT-2 on FineWeb; nats per token",
    source="KellerJordan/modded-nanogpt f411b3d: main.log of records/track_1_short/2024-10-13_llmc and of "
    "records/track_2_medium/2025-01-18; no published loss of its 774M was found, and 1558M has other tokens",
    fitted=[
        _point("124M", matmul_parameter_count(GPT2_SMALL), 19_560 * 524_288, 3.2722),
        _point("350M", matmul_parameter_count(GPT2_SIZES["350M"]), 60_000 * 524_288, 2.9282),
    ],
    targets=[],
)
SERIES = (NANOCHAT, CEREBRAS, CHINCHILLA, LLM_C)


def main() -> None:
    """Print the forecasts of the large runs."""
    for series in SERIES:
        print(series.name, series.source, sep="\n")
        try:
            fit, held_out = fit_law(series.fitted), hold_out_largest(series.fitted)
        except BadInput as refused:
            print(f"no forecast: {refused}\n")
            continue
        print(refusal(held_out) or f"no refusal: {held_out.text()}", "", sep="\n")
        rows = []
        for point in series.targets:
            forecast = fit.predict(point.parameters, point.tokens)
            assert forecast.low is not None and forecast.high is not None
            factor = point.parameters * point.tokens / fit.compute
            inside = "inside" if forecast.low <= point.loss <= forecast.high else "outside"
            error = f"{100 * (forecast.value / point.loss - 1):+.1f} %"
            rows.append([point.rung, f"{factor:.1f}", forecast.text(3), f"{point.loss:.3f}", error, inside])
        heads = ["run", "compute, of the largest fitted", "forecast", "published", "error", "90 % interval"]
        print(command.table(heads, rows), "\n")


if __name__ == "__main__":
    command.run(main)
