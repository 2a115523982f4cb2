"""Records with odd values, such as numbers that JSON allows but arithmetic does not, never crash their readers.

Every value in every kind of record is replaced with every odd value. Readers must return, or raise BadInput.
"""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from common.files import replace_file
from evaluation.comparison.compare import as_fragment, compare
from evaluation.comparison.rows import read_rows
from evaluation.shared.results import seconds_by_price
from experiments.shared.account import Account
from experiments.shared.run_progress import measured_speed, read_progress
from experiments.shared.training_jobs import PoolOptions
from reporting.report_page import report_page
from reporting.run_history import read_history
from reporting.samples.sample_sections import sample_sections
from reporting.trackers.tracker_sync import tracked_rows
from tests.evaluation.comparison.stored import core, losses_on
from tests.reporting.written_runs import start, step, training, write_run
from training.config.train_config import load_run
from training.planning.estimate import start_up_of
from training.planning.forecast_file import FORECAST, describe_forecast_file
from training.supervision.run_lock import final_exit
from training.telemetry.budget import Budget
from training.telemetry.chart import draw_chart
from training.telemetry.metrics_log import ACCOUNT, METRICS, current_records, read_counted
from training.telemetry.time_ledger import read_earlier

ODD = [1e308, -1e308, 5e-324, 10**400, math.nan, math.inf, -1, 0, True, None, "x", "\ud800", "a\0b", [], {}, [[1e308]]]
SOURCES = [{"dataset": "d", "tokens": 5, "epochs": 0.1}]
SECONDS = {"compile": 1.0, "start-up": 2.0, "training": 3.0}
RECORDS: list[dict[str, Any]] = [
    {**start(), "time": "2026-01-01T00:00:00Z"},
    {**step(5), "epochs": [0.5], "peak_memory_bytes": 5, "skipped_steps": 1},
    {"step": 5, "validation_loss": 3.0, "validation_losses": {"a": 3.0, "b": 2.0}, "elapsed_seconds": 5.0},
    {"event": "diverged", "step": 6, "problem": "x"},
    {"event": "stopped", "step": 6, "reason": "--max-hours", "sources": SOURCES},
    {"event": "end", "step": 6, "sources": SOURCES, "ledger": SECONDS, "run_ledger": SECONDS, "elapsed_seconds": 6.0},
]


def odd_forms(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value. In each copy, one part is missing or is replaced by an odd value."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value[:1])) if value else []
    for key, part in items:
        inner = odd_forms(part) if isinstance(part, dict | list) else ()
        for odd in (*ODD, *inner):
            changed = copy.copy(value)
            changed[key] = odd
            yield changed
        if isinstance(value, dict):
            yield {name: content for name, content in value.items() if name != key}


def lines_of(*records: Any) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


def read_all(run: Path) -> None:
    lines = read_counted(run).records
    tracked_rows(lines, current_records(lines))
    page = report_page([run], [read_history(run)], sample_sections([run], record=False)[0])
    replace_file(run / "report.html", page)
    read_earlier(run, 0.0), start_up_of(run), read_progress(run), measured_speed(run), final_exit(run)
    seconds_by_price(lines, 5.0, None)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.get("event", "step"))
def test_odd_metrics_lose_only_their_line(tmp_path: Path, record: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run", training(30))
    intact = (run / METRICS).read_text()
    forms = list(odd_forms(record))
    (run / METRICS).write_text(intact + lines_of(*forms) + intact)
    assert len(read_counted(run).damaged) > len(forms) / 8
    read_all(run)
    draw_chart(run)


def test_odd_records_do_not_prevent_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", training(30))
    text = {"source": "a: b", "ids": [1, 2], "tokens": ["a", "b"], "window": 2}
    continuations = [{"prompt": "a", "temperature": 1.0, "text": "b"}]
    sample = {"step": 5, "name": "step-00000005", "weights_sha256": "x", "starts": 1, "said": continuations}
    sample |= {"held_out": text, "log_probabilities": [-1.0]}
    (run / "samples.jsonl").write_text(lines_of(*odd_forms(sample), sample))
    read_all(run)
    for form in odd_forms({"status": 0, "outcome": "done", "final": True}):
        (run / "exit.json").write_text(json.dumps(form))
        assert read_history(run).step > 0 and final_exit(run) is None


def test_odd_account_lines_are_left_out(tmp_path: Path) -> None:
    spent = {"seconds": 1.0, "usd": 1.0, "unpriced_seconds": 1.0}
    line = {"time": 1e9, "spent": spent, "price_per_hour": 1.0, "ended": True}
    (tmp_path / ACCOUNT).write_text(lines_of(*odd_forms(line), line))
    account = Account(tmp_path, PoolOptions(price_per_hour=2.0, budget=Budget(max_usd=10.0, max_hours=1.0)))
    assert all(value is not None and math.isfinite(value) for value in (account.usd(), account.seconds_left()))
    account.describe()


@pytest.mark.filterwarnings("error")
def test_odd_results_and_forecasts_are_left_out_or_refused(tmp_path: Path) -> None:
    homes = [core(tmp_path / name, 1, tasks=2) for name in ("a", "b")]
    homes = [losses_on(home, dataset="x", start=0, count=10) for home in homes]
    path = homes[0] / "evaluations.jsonl"
    intact = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(lines_of(*(form for record in intact for form in odd_forms(record)), *intact))
    rows = read_rows(list(map(str, homes)))
    assert len(rows) == 2 and as_fragment(compare(rows))
    run = load_run(write_run(tmp_path / "run", training(30)), ())
    target = {"loss": 3.0, "low": 2.0, "high": 4.0, "extrapolation": 2.0}
    forecast = {"date": "x", "commit": None, "target": target, "points": [], "held_out": {"error": 0.01}}
    for form in odd_forms(forecast | {"recipe": {"model": {"n_layers": 1}, "train": {"learning_rate": 1}}}):
        (run.directory / FORECAST).write_text(json.dumps(form))
        try:
            describe_forecast_file(run)
        except BadInput as error:
            assert "\n" not in str(error)
