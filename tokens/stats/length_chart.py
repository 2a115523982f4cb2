"""Chart `document-lengths.png`: shares of documents and of tokens by document length."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import printable
from common.files import replace_file

CHART = "document-lengths.png"
BINS_PER_DOUBLING = 4
DOCUMENTS, TOKENS, MARK = "#4477aa", "#cc3311", "#444444"


def draw_chart(directory: Path, values: np.ndarray, counts: np.ndarray) -> None:
    """Draw document lengths, ascending, with their counts. The file is replaced atomically.

    Bins are log-spaced and hold whole lengths, so short ones differ in width; heights are shares per doubling of the
    length, which makes areas of equal size equal shares.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

    documents, tokens = int(counts.sum()), int(values @ counts)
    longest = max(2, int(values[-1]))
    powers = np.arange(0, np.log2(longest) + 2 / BINS_PER_DOUBLING, 1 / BINS_PER_DOUBLING)
    edges = np.unique(np.ceil(2**powers - 1e-9).astype(np.int64))
    edges = np.append(edges[edges <= longest], edges[edges > longest][:1])
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for weights, total, color, label in (
        (counts, documents, DOCUMENTS, "of documents"),
        (counts * values, tokens, TOKENS, "of tokens"),
    ):
        heights = np.histogram(values, edges, weights=weights)[0] / max(1, total) / np.diff(np.log2(edges))
        axes.stairs(heights, edges, color=color, fill=True, alpha=0.25)
        axes.stairs(heights, edges, color=color, linewidth=1.5, label=label)
    _mark(axes, int(values[np.searchsorted(np.cumsum(counts), documents / 2)]), "median")
    _mark(axes, tokens / documents, "mean")
    axes.set_xscale("log", base=2)
    shortest = values[values > 0][:1]  # an empty document has no place on a log scale
    axes.set_xlim(edges[edges <= max([1, *shortest])][-1], edges[-1])
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])  # room for the labels of the marks
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("tokens per document (without end-of-text)")
    axes.set_ylabel("share per doubling of the length")
    empty = int(counts[0]) if values[0] == 0 else 0
    title = f"{printable(directory.resolve().name)}: how long {documents:,} documents are"
    axes.set_title(title + (f" ({empty:,} empty ones not shown)" if empty else ""), parse_math=False)
    axes.legend(loc="upper left")
    axes.grid(alpha=0.25)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    replace_file(directory / CHART, drawn.getvalue())


def _mark(axes: Any, length: float, name: str) -> None:
    axes.axvline(max(1, length), color=MARK, linestyle=":" if name == "mean" else "--", linewidth=1)
    side = "left" if name == "mean" else "right"
    text = f" {name} {length:,.0f} "
    axes.text(max(1, length), 0.98, text, transform=axes.get_xaxis_transform(), ha=side, va="top", color=MARK)
