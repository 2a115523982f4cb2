"""`evaluations.jsonl` of a run or model: append-only, one result a line; what is shown is drawn from it."""

import json
import os
from pathlib import Path
from typing import Any

from errors import BadInput
from training.claim import utc_now
from training.metrics import EVALUATIONS


def append_result(home: Path, model: str, kind: str, values: dict[str, Any]) -> None:
    """Append a result to those of a model, which `home` and `model`, its title, are of; wait until it is on the disk.

    Raises BadInput where that cannot be done.
    """
    line = json.dumps({"evaluation": kind, "model": model, "time": utc_now(), **values})
    path = home / EVALUATIONS
    try:
        home.mkdir(parents=True, exist_ok=True)
        torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        with path.open("a") as file:
            file.write(("\n" if torn else "") + line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error}; the result is {line}") from error


def read_results(home: Path) -> list[dict[str, Any]]:
    """Return the results that are kept in `home`, oldest first; torn lines are skipped."""
    path = home / EVALUATIONS
    results = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if isinstance(result, dict) and isinstance(result.get("model"), str):
            results.append(result)
    return results
