"""Result log of a run or model: `evaluations.jsonl`, append-only, one result per line."""

import json
import math
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from common.errors import BadInput, printable
from common.files import write_error
from common.json_files import JsonLines, JsonLog, is_number, numbers_in, read_json_lines, utc_now
from training.telemetry.metrics_log import EVALUATIONS


def append_result(home: Path, model: str, kind: str, values: dict[str, Any]) -> None:
    """Append a result to a model's log and sync it. `home`: the model's directory; `model`: its title.

    Raises BadInput where that fails.
    """
    result = {"evaluation": kind, "model": model, "time": utc_now(), **values}
    path = home / EVALUATIONS
    try:
        home.mkdir(parents=True, exist_ok=True)
        with closing(JsonLog(path)) as log:
            log.append(result, durable=True)
    except OSError as error:
        raise BadInput(f"{write_error(path, error)}; the result is {json.dumps(result)}") from error


def is_newest(home: Path, model: str, kind: str, values: dict[str, Any]) -> bool:
    """Tell whether a model's newest result of that kind equals this one."""
    kept, written = results_of(home, model, kind), as_read(values)
    return bool(kept) and {key: kept[-1].get(key) for key in written} == written


def results_of(home: Path, model: str, kind: str) -> list[dict[str, Any]]:
    """Return a model's results of one kind, oldest first. Raises BadInput as `read_results` does."""
    return [result for result in read_results(home) if (result.get("evaluation"), result["model"]) == (kind, model)]


def as_read(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as they are read back from JSON: tuples become lists, keys strings."""
    return json.loads(json.dumps(values))


def read_results(home: Path) -> list[dict[str, Any]]:
    """Return all results of a log, oldest first; a note tells which lines are left out as damaged.

    Raises BadInput where the file cannot be read.
    """
    lines = read_result_lines(home)
    tell(lines)
    return lines.records


def read_result_lines(home: Path) -> JsonLines:
    """Return the results of a log, and which lines are left out. Raises BadInput where the file cannot be read."""
    return read_json_lines(home / EVALUATIONS).parsed(_is_sound)[1]


def tell(lines: JsonLines) -> None:
    """Print which lines are left out."""
    for note in lines.notes():
        print(printable(note), file=sys.stderr)


def _is_sound(record: dict[str, Any]) -> bool:
    """Tell whether a result names its model and evaluation, and its numbers are within arithmetic, or not finite."""
    named = isinstance(record.get("model"), str) and isinstance(record.get("evaluation"), str)
    numbers = (one for one in numbers_in(record) if type(one) is int or math.isfinite(one))
    return named and all(map(is_number, numbers))
