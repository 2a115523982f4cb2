"""Show the newest CORE score that evaluate.py has stored for a run, as a line of --plan."""

from typing import Any

from common.checks import number
from common.json_files import read_json_lines
from training.checkpoints.lookup import checkpoint_titled
from training.checkpoints.saved_state import weights_digest
from training.config.train_config import Run
from training.telemetry.metrics_log import EVALUATIONS, GIVEN_TOKENIZER, WEIGHTS_FILE

_CORE = number(-100, 1)  # a centered score: 1 if all answers are right, 0 at chance, negative below chance


def describe_core(run: Run) -> list[str]:
    """Return a list with one line, which shows the newest CORE score that evaluate.py has stored for a run.

    The score may cover only some of the tasks. The list is empty if there is no score. A score is skipped if the
    checkpoint with the recorded name has different weights now. If the record has no hash of the weights, the line says
    so.
    """
    for record in reversed(read_json_lines(run.directory / EVALUATIONS, containing=b'"core"').records):
        if record.get("evaluation") == "core" and _CORE.holds(core := record.get("core")):
            title = str(record.get("model"))
            measured = record.get(WEIGHTS_FILE)
            present = weights_digest(checkpoint_titled(run.directory, title))
            if measured is not None and present is not None and measured != present:
                continue
            unknown = "" if measured is not None else ", weights unknown"
            score = f"{core:.4f}" + (f" ± {error:.4f}" if number(0).holds(error := record.get("core_error")) else "")
            limits = "".join(f", {limit}" for limit in _limits_of_core(record))
            return [f"core         {score}, {title}{unknown}{limits}, {record.get('time')}; see evaluate.py compare"]
    return []


def _limits_of_core(record: dict[str, Any]) -> list[str]:
    """Return the limits of a stored score: the part of CORE that it covers, and the tokenizer if --tokenizer set it."""
    tasks, data, tokenizer = (record.get(key) for key in ("tasks", "data", GIVEN_TOKENIZER))
    limits = [f"of {len(tasks)} tasks"] if isinstance(tasks, dict) else []
    if isinstance(data, dict) and type(data.get("count")) is int:
        limits.append(f"at most {data['count']:,} items of each")
    if isinstance(tokenizer, dict):
        limits.append(f"with tokenizer {tokenizer.get('name')} from --tokenizer")
    return limits
