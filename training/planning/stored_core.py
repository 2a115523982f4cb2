"""Newest CORE that evaluate.py has stored of a run, as a line of --plan."""

from typing import Any

from common.checks import number
from common.json_files import read_json_lines
from training.checkpoints.lookup import checkpoint_titled
from training.checkpoints.saved_state import weights_digest
from training.config.train_config import Run
from training.telemetry.metrics_log import EVALUATIONS, GIVEN_TOKENIZER, WEIGHTS_FILE

_CORE = number(-100, 1)  # centered on chance: 1 is all right, and below 0 is worse than chance


def describe_core(run: Run) -> list[str]:
    """Return the newest CORE, of all tasks or some, that evaluate.py stored of a run, as a line; none without one.

    A score of other weights than the checkpoint of its name has now is left out; one without their hash says so.
    """
    for record in reversed(read_json_lines(run.directory / EVALUATIONS, containing=b'"core"').records):
        if record.get("evaluation") == "core" and _CORE.holds(core := record.get("core")):
            title = str(record.get("model"))
            measured = record.get(WEIGHTS_FILE)
            now = weights_digest(checkpoint_titled(run.directory, title))
            if measured is not None and now is not None and measured != now:
                continue
            unknown = "" if measured is not None else ", weights unknown"
            shown = f"{core:.4f}" + (f" ± {error:.4f}" if number(0).holds(error := record.get("core_error")) else "")
            limits = "".join(f", {limit}" for limit in _limits_of_core(record))
            return [f"core         {shown}, {title}{unknown}{limits}, {record.get('time')}; see evaluate.py compare"]
    return []


def _limits_of_core(record: dict[str, Any]) -> list[str]:
    """Return how much of CORE a stored score covers, and a tokenizer that is not known to be the run's own."""
    tasks, data, given = (record.get(key) for key in ("tasks", "data", GIVEN_TOKENIZER))
    limits = [f"of {len(tasks)} tasks"] if isinstance(tasks, dict) else []
    if isinstance(data, dict) and type(data.get("count")) is int:
        limits.append(f"at most {data['count']:,} items of each")
    if isinstance(given, dict):
        limits.append(f"read by tokenizer {given.get('name')} of --tokenizer")
    return limits
