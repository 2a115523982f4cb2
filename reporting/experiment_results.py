"""Results of an experiment as a part of a page: differences of a sweep or a trial, a ladder's points and law."""

from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.json_files import read_json
from common.line_chart import PALETTE, Line, LineChart
from common.web_page import render

COLUMNS = ("variant", "loss", "difference from the base, with its interval")
FLOPS = 6  # of a token and a weight in a matrix product, both passes


def experiment_results(directory: Path) -> str | None:
    """Return the results that experiment.py has left in a directory as HTML; None where it ran no experiment."""
    template = "reporting/templates/experiment_results.html"
    for name in ("sweep", "mixture", "trial", "ladder"):
        if (directory / f"{name}.json").exists():
            record, text = read_json(directory / f"{name}.json"), (directory / f"{name}.md").read_text(errors="replace")
            chart = law_chart(record).svg() if name == "ladder" else None
            return render(template, **{"columns": COLUMNS} | record | {"chart": chart, "text": text})
    text = "No table yet: experiment.py writes it at the end, or of the runs that are there: sweep FILE --collect"
    return render(template, chart=None, variants=None, text=text) if (directory / "account.jsonl").exists() else None


def law_chart(record: dict[str, Any]) -> LineChart:
    """Return the chart of ladder.json: measured points and the law of each size over compute, and the forecast."""
    series: dict[str, list[tuple[float, float, float]]] = {}
    for point in record["points"]:
        series.setdefault(point["rung"], []).append((point["tokens"], point["loss"], point["parameters"]))
    if isinstance(target := record["target"], dict):  # none, or its name in an older file: no forecast
        losses = (target[key] for key in ("loss", "low", "high"))
        series["forecast, 90 %"] = [(target["tokens"], loss, target["parameters"]) for loss in losses]
    law, lines = record["law"], []
    for number, (name, points) in enumerate(series.items()):
        tokens, loss, size = np.array(sorted(points), float).T
        line = Line(name=name, x=FLOPS * size * tokens, y=loss, colour=number % len(PALETTE), dotted=True)
        lines.append(line)
        if law:
            along, shape = np.geomspace(tokens[0] / 2, tokens[-1], 50), law["size_factor"] / size[0] ** law["alpha"]
            fitted = law["floor"] + shape + law["token_factor"] / along ** law["beta"]
            lines.append(attrs.evolve(line, name=f"law, {name}", x=FLOPS * size[0] * along, y=fitted, dotted=False))
    title = f"validation loss of {', '.join(series)}, from the left; solid: law"
    return LineChart(title=title, axis="FLOPs, 6 N D", lines=lines, logarithmic=True, logarithmic_x=True)
