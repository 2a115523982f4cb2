"""`evaluations.jsonl` of a run: append-only, one result a line; what is shown of evaluations is drawn from it."""

import json
import os
from typing import Any

from errors import BadInput
from evaluation.load import Place
from training.claim import utc_now
from training.metrics import EVALUATIONS


def append_result(place: Place, kind: str, values: dict[str, Any]) -> None:
    """Append a result to the run that a model belongs to, and wait until it is on the disk; without a run do nothing.

    Raises BadInput where that cannot be done.
    """
    if place.run is None:
        return
    line = json.dumps({"evaluation": kind, "model": place.path.name, "time": utc_now(), **values})
    path = place.run / EVALUATIONS
    try:
        torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        with path.open("a") as file:
            file.write(("\n" if torn else "") + line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error}; the result is {line}") from error
