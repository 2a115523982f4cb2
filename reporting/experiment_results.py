"""Results of an experiment as a part of a page: a sweep's differences with intervals, a ladder's points and law."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from common.errors import BadInput
from common.json_files import read_json
from common.line_chart import PALETTE, Line, LineChart
from common.web_page import render

if TYPE_CHECKING:
    from markupsafe import Markup

FLOPS = 6  # of a token and a weight in a matrix product, both passes


def experiment_results(directory: Path) -> "Markup | None":
    """Return the results that experiment.py has left in a directory as HTML; None where there are none to read."""
    from jinja2 import UndefinedError

    for name in ("sweep", "ladder"):
        try:
            record = read_json(directory / f"{name}.json")
            text = (directory / f"{name}.md").read_text(errors="replace")
            chart = law_chart(record).svg() if name == "ladder" else None
            return render("reporting/templates/experiment_results.html", chart=chart, text=text, **record)
        except (BadInput, OSError, LookupError, TypeError, ValueError, UndefinedError):  # none, edited or damaged
            continue
    return None


def law_chart(record: dict[str, Any]) -> LineChart:
    """Return the chart of ladder.json: measured points and the law of each size over compute, and the forecast."""
    series: dict[str, list[tuple[float, float, float]]] = {}
    for point in record["points"]:
        series.setdefault(point["rung"], []).append((point["tokens"], point["loss"], point["parameters"]))
    if record.get("forecast_for"):
        size, target = record["forecast_for"]
        series["forecast, 90 %"] = [(target, loss, size) for loss in record["forecast"]]
    lines = []
    for number, (name, points) in enumerate(series.items()):
        tokens, loss, (size, *_) = np.array(sorted(points), float).T
        line = Line(name=name, x=FLOPS * size * tokens, y=loss, colour=number % len(PALETTE), dotted=True)
        lines.append(line)
        if law := record["law"]:
            along = np.geomspace(tokens.min() / 2, tokens.max(), 50)
            fitted = (
                law["floor"] + law["size_factor"] / size ** law["alpha"] + law["token_factor"] / along ** law["beta"]
            )
            lines.append(attrs.evolve(line, name=f"law, {name}", x=FLOPS * size * along, y=fitted, dotted=False))
    title = f"validation loss of {', '.join(series)}, from the left; solid: law"
    return LineChart(title=title, axis="FLOPs, 6 N D", lines=lines, logarithmic=True, logarithmic_x=True)
