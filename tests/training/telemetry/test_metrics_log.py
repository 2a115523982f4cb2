"""Metrics log: damaged lines are ignored and counted; lines that cannot be written are kept in memory and reported."""

import ast
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from common import json_files
from tests.conftest import ROOT, MakeRun, complete, train
from training.telemetry.chart import draw_chart
from training.telemetry.metrics_log import (
    METRICS,
    Detail,
    EarlyEnd,
    Metric,
    MetricsLog,
    RunEvent,
    current_records,
    event_of,
    event_record,
    read_counted,
    read_metrics,
)
from training.telemetry.time_ledger import read_earlier

NUMBERS = [None, "1", [], {}, True, 10**400, -1]
COMMITS = {"ledger": {"compile": 1.0}, "run_ledger": {"compile": 1.0}, "elapsed_seconds": 5.0}
UNSOUND: list[Any] = [
    *({"step": value, "train_loss": 1.0} for value in [*NUMBERS, 10**30, 1.5]),
    *({"step": 1, "train_loss": value} for value in NUMBERS[:-1]),
    *({"step": 1, "validation_loss": value} for value in NUMBERS[:-1]),
    *({"step": 1, "validation_loss": 1.0, "validation_losses": value} for value in (None, [], {"a": "x"}, {"a": None})),
    *({"step": 1, "train_loss": 1.0, key: "x"} for key in ("learning_rate", "grad_norm", "elapsed_seconds")),
    *({"event": "start", "step": value} for value in NUMBERS),
    *({"event": value} for value in (["x"], {}, 5)),
    {"event": "start"},
    {"train_loss": 1.0},
    {"event": "start", "step": 0, "price_per_hour": "x"},
    *({**COMMITS, key: value} for key in COMMITS for value in (None, [], {"compile": "x"}, {"other": 1})),
    {"ledger": {"compile": 1.0}},
]


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_malformed_records_are_ignored_and_counted(tmp_path: Path) -> None:
    sound = [
        {"event": "start", "step": 0, "price_per_hour": None},
        {"step": 1, "train_loss": 2.0, "grad_norm": None},
        {"step": 2, "train_loss": float("nan"), "learning_rate": 1e-3, "elapsed_seconds": 3},
        {"step": 2, **COMMITS},
        {"event": "odd", "other": {}},
    ]
    with (tmp_path / METRICS).open("wb") as file:
        for record in (*sound, *UNSOUND):
            file.write(json.dumps(record).encode() + b"\n")
        file.write(b"[1,2]\n\xff\xfe\n" + b'{"a":' * 100_000 + b'\n{"step": 3, "trai')
    assert json.dumps(read_metrics(tmp_path)) == json.dumps(sound)
    assert len(read_counted(tmp_path).damaged) == len(UNSOUND) + 4
    assert read_earlier(tmp_path, 0.0).seconds == 5.0
    assert draw_chart(tmp_path).stat().st_size > 5000


def test_last_start_at_a_step_counts() -> None:
    first, loss = {"event": "start", "step": 0}, {"step": 5, "train_loss": 1.0}
    ending = [{"event": "checkpoint", "step": 5}, {"event": "stopped", "step": 5, "reason": "signal"}]
    beginning = [{"event": name, "step": 5} for name in ("numerics-drift", "start", "self-test", "settings-changed")]
    restart = [line | {"job": 2} for line in beginning]
    lines = [first | {"job": 0}, first, loss, *ending, *beginning, {"step": 6, "train_loss": 1.0}, *restart]
    assert current_records(lines) == [first, loss, *ending, *restart]
    assert current_records([*lines, beginning[1]]) == [first, loss, *ending, beginning[1]]


def test_damaged_log_is_reported_and_allows_a_resume(make_run: MakeRun) -> None:
    run = make_run()
    complete(run, "--max-steps", "4")
    lines = (run / METRICS).read_bytes().splitlines(keepends=True)
    lines[1] = bytes([lines[1][0] | 0x80]) + lines[1][1:]
    (run / METRICS).write_bytes(b"".join(lines) + b"[1,2]\n")
    done = complete(run)
    assert f"NOTE: {run / METRICS}: skipped 2 damaged lines, starting at line 2" in done.stderr
    assert "resuming from" in done.stdout


@pytest.mark.parametrize("memory_bytes", [None, 1000])
def test_unwritable_lines_are_written_later_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], memory_bytes: int | None
) -> None:
    monkeypatch.setattr(json_files, "PENDING_BYTES", memory_bytes or json_files.PENDING_BYTES)
    log = MetricsLog(tmp_path)
    with full_disk(500):
        for step in range(100):
            log.write({"step": step, "train_loss": 1.0})
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"WARNING: {tmp_path / METRICS}: cannot be written: File too large; ")
        if memory_bytes is not None:
            log.close()
    complete_lines = len(read_metrics(tmp_path))
    if memory_bytes is None:
        log.write({"step": 100, "train_loss": 1.0})
        log.close()
        assert capsys.readouterr().err.splitlines() == [
            f"{tmp_path / METRICS}: can be written again; the lines in memory have been written"
        ]
        assert [record["step"] for record in read_metrics(tmp_path)] == list(range(101))
    else:
        problem = f"{100 - complete_lines} lines could not be written and are lost: File too large"
        assert capsys.readouterr().err.splitlines() == [f"WARNING: {tmp_path / METRICS}: {problem}"]


@pytest.mark.parametrize("kind", ["device", "folder", "pipe"])
def test_log_that_is_not_a_file_is_refused(make_run: MakeRun, kind: str) -> None:
    run = make_run()
    path = run / METRICS
    {"device": lambda: path.symlink_to("/dev/full"), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}[kind]()
    done = train(run, ranks=2 if kind == "device" else 1)
    assert done.returncode == 1
    assert done.stderr.count(f"train.py: {path}: cannot be read: is a {kind}, wanted a regular file") == 1
    assert 'train.py", line' not in done.stderr
    assert not (run / "checkpoints").exists()
    assert "step 1" not in done.stderr


# Names that only earlier versions wrote. Lines with these names can still be read.
EARLIER = {Metric.SKIPPED_STEPS, RunEvent.SPIKE_SKIPPED, Detail.WHO}
# Names that are also ordinary words or keys of other files
COMMON_METRICS = {Metric.LEARNING_RATE, Metric.EPOCHS, Metric.USD, Metric.PRICE_PER_HOUR, Metric.STATE_SHA256}
COMMON_DETAILS = {Detail.NAME, Detail.KEY}
# Pairs of a module and a metric. The module reads or writes another file, in which a key has the metric's name. These
# files are the list of measured machines and the results of evaluations.
OTHER_FILES = {
    ("training/planning/throughput.py", Metric.TOKENS_PER_SECOND),
    ("evaluation/instruct/instruct.py", Metric.VALIDATION_LOSS),
}


def names_of(kind: type) -> set[str]:
    return {value for name, value in vars(kind).items() if name.isupper()}


def called_name(call: ast.Call) -> str:
    """Return the name of the function or method in a call, or "" if it has no name."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def literal_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of metrics, events and details that are written as a string or a keyword instead of a constant.

    The name of an event may be an ordinary word, so it counts only in a comparison or a call that is about events. The
    reasons for an early end are also names of keys and options, so all of them except "signal" count only in a
    comparison. The names of details are also keys of other files, so they count only in modules that import names of
    events.
    """
    details = names_of(Detail)
    names = (names_of(Metric) - COMMON_METRICS) | {name for name in names_of(RunEvent) if "-" in name}
    names |= {"event", EarlyEnd.SIGNAL}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    if imported & {RunEvent.__name__, event_of.__name__}:
        names |= details - COMMON_DETAILS
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in names:
            yield node.value
        elif isinstance(node, ast.Compare):
            if isinstance(node.left, ast.Call) and called_name(node.left) == event_of.__name__:
                yield from (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            operands = [part.value for part in (node.left, *node.comparators) if isinstance(part, ast.Constant)]
            yield from (operand for operand in operands if operand in names_of(EarlyEnd))
        elif isinstance(node, ast.Call) and called_name(node) in ("record", "event", event_record.__name__):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))
            yield from (keyword.arg for keyword in node.keywords if keyword.arg in names | details)


def test_metrics_events_and_details_are_named_by_constants() -> None:
    rooms = ("training", "evaluation", "experiments", "reporting", "benchmarks")
    files = [*ROOT.glob("*.py"), *(path for room in rooms for path in (ROOT / room).rglob("*.py"))]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}
    constants = set(literal_names(trees.pop("training/telemetry/metrics_log.py")))
    assert constants > EARLIER - names_of(Detail)
    literals = {(module, name) for module, tree in trees.items() for name in literal_names(tree)}
    assert literals == OTHER_FILES


@pytest.mark.parametrize(
    "code",
    [
        "'train_loss' in record",
        "event_of(record) == 'start'",
        "event_of(record) in ('end', RunEvent.PAUSE)",
        "record.get('event')",
        "reporter.event(1, 'stopped')",
        "reporter.record(1, {'mfu': 1})",
        "reporter.record(1, grad_norm=2)",
        "reporter.event(1, RunEvent.DIVERGED, problem='x')",
        "event_record(1, RunEvent.UPLOAD, name='x')",
        "from training.telemetry.metrics_log import event_of\nrecord.get('sources')",
        "from training.telemetry.metrics_log import RunEvent\nrecord['reason']",
        "stopped_by == 'patience'",
        "return 'signal' if limit is None else limit[1]",
    ],
)
def test_literal_name_of_a_metric_is_noticed(code: str) -> None:
    assert [*literal_names(ast.parse(code))]


def test_docs_name_every_metric_event_and_detail() -> None:
    page = (ROOT / "docs" / "run-directory.md").read_text()
    names = (names_of(Metric) | names_of(RunEvent) | names_of(Detail)) - EARLIER
    assert not [name for name in sorted(names) if f"`{name}`" not in page]


def test_docs_name_every_early_end() -> None:
    page = (ROOT / "docs" / "run-directory.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith(f"| `{RunEvent.PAUSE}`, ")]
    assert not [name for name in sorted(names_of(EarlyEnd)) if f"`{name}`" not in row]
