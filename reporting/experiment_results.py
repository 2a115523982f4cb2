"""Results of an experiment as a part of a page: a sweep's differences with intervals, a ladder's points and law."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import BadInput
from common.json_files import read_json
from common.line_chart import PALETTE, Line, LineChart
from common.web_page import render
from evaluation.comparison.compare import Cell, Comparison, as_fragment

if TYPE_CHECKING:
    from markupsafe import Markup

BAR_WIDTH = 280  # pixels of an interval's column
FLOPS = 6  # of a token and a weight in a matrix product, both passes


def experiment_results(directory: Path) -> "Markup | None":
    """Return the results that experiment.py has left in a directory as HTML; None where there are none to read."""
    for name, draw in (("sweep", _differences), ("ladder", _law_chart)):
        try:
            drawn = draw(read_json(directory / f"{name}.json"))
            text = (directory / f"{name}.md").read_text(errors="replace")
        except (BadInput, OSError, LookupError, TypeError, ValueError, ArithmeticError):  # none, edited or damaged
            continue
        return render("reporting/templates/experiment_results.html", drawn=drawn, text=text)
    return None


def _differences(record: dict[str, Any]) -> "Markup":
    """Return a row for each variant of sweep.json, the interval of its difference drawn."""
    rows = []
    for at, one in enumerate(record["variants"]):
        mean = "-" if one["mean"] is None else f"{one['mean']:.4f}"
        value, low, high = one["difference"] or (0.0, 0.0, 0.0)
        text = "0" if at == 0 else f"{value:+.4f} [{low:+.4f}, {high:+.4f}]"
        drawn = Cell(text=text, value=value, bounds=(low, high)) if one["difference"] or at == 0 else Cell(text="-")
        rows.append([Cell(text=str(one["name"])), Cell(text=str(len(one["losses"]))), Cell(text=mean), drawn])
    columns = ["variant", "runs", "validation loss", "difference from the base"]
    return as_fragment(Comparison(columns=columns, rows=rows, statements=[], notes=[]), BAR_WIDTH)


def _law_chart(record: dict[str, Any]) -> str:
    """Return the chart of ladder.json: measured points and the law of each size over compute, and the forecast."""
    law, lines = record["law"], []
    sizes = {point["rung"]: point["parameters"] for point in record["points"]}
    for number, (rung, parameters) in enumerate(sizes.items()):
        points = [point for point in record["points"] if point["rung"] == rung]
        tokens = np.array([point["tokens"] for point in points], float)
        colour, compute = number % len(PALETTE), FLOPS * parameters * tokens
        for point, x in zip(points, compute, strict=True):
            lines.append(Line(name=rung, x=np.array([x]), y=np.array([point["loss"]]), colour=colour))
        lines += _law_line(law, f"law, {rung}", parameters, tokens, colour) if law else []
    if law and record.get("forecast_for"):
        parameters, tokens = record["forecast_for"]
        value, low, high = record["forecast"]
        colour, compute = len(sizes) % len(PALETTE), np.full(2, FLOPS * parameters * float(tokens))
        lines += _law_line(law, "law, target", parameters, np.array([tokens / 8, tokens]), colour)
        lines.append(Line(name="forecast, 90 %", x=compute, y=np.array([low, high]), colour=colour, weight="bold"))
        lines.append(Line(name="forecast", x=compute[:1], y=np.array([value]), colour=colour))
    title, axis = f"validation loss of {', '.join(sizes)}, from the left; law, forecast, 90 %", "FLOPs, 6 N D"
    return LineChart(title=title, axis=axis, lines=lines, logarithmic=True, logarithmic_x=True).svg()


def _law_line(law: dict[str, float], name: str, parameters: int, tokens: np.ndarray, colour: int) -> list[Line]:
    tokens = np.geomspace(tokens.min(), tokens.max(), 50)
    losses = (
        law["floor"] + law["size_factor"] / parameters ** law["alpha"] + law["token_factor"] / tokens ** law["beta"]
    )
    return [Line(name=name, x=FLOPS * parameters * tokens, y=losses, colour=colour)]
