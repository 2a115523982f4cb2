"""The history of a run has everything that can be read, even if some files or lines are damaged or missing."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from reporting.report_page import differing_settings, facts, recipe, report_page
from reporting.run_history import NotBegun, check_begun, read_history
from reporting.samples.sample_log import record_samples
from tests.reporting.written_runs import start, step, training, write_resolved, write_run
from tests.tokens.preparing import jsonl, write
from training.supervision.run_lock import take_run_lock


def test_lost_steps_leave_curves_but_not_costs(tmp_path: Path) -> None:
    killed = [start(price=36.0), step(10), step(20), step(30, 9.0)]
    resumed = [start(20, price=72.0, elapsed=40.0), step(30, 2.0, elapsed=50.0)]
    history = read_history(write_run(tmp_path / "run", killed + resumed))
    assert history.curves["train_loss"].steps.tolist() == [10, 20, 30]
    assert history.curves["train_loss"].last == 2.0
    # 30 s at one cent per second, then 20 s at two cents. The first 10 s at two cents are the startup of the second
    # job.
    assert history.usd == pytest.approx(0.30 + 0.40)
    assert history.axes["dollars"].last == pytest.approx(0.70)
    assert [(mark.step, mark.kind) for mark in history.marks] == [(20, "restart")]
    assert history.state == "killed"
    anew = [start(), step(10), start(elapsed=30.0), step(10, elapsed=40.0)]
    marks = read_history(write_run(tmp_path / "anew", anew)).marks
    assert [(mark.step, mark.kind) for mark in marks] == [(0, "restart")]


def test_a_run_without_metrics_has_not_begun(tmp_path: Path) -> None:
    with pytest.raises(NotBegun, match="the run has not begun"):
        check_begun(tmp_path)
    check_begun(write_run(tmp_path / "run", [start()]))


def test_a_run_without_a_price_has_no_dollars(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "run", [start(price=None), step(10)]))
    assert history.usd is None
    assert "dollars" not in history.axes
    assert "mfu" not in history.curves


def test_a_run_is_described_as_it_was_trained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start(), step(10)])
    present = read_history(run)
    assert (present.model.emb_dim, present.train.optimization.learning_rate, present.record) == (128, 0.004, None)
    changed = {"model": {"emb_dim": 64, "context_length": 32}, "train": {"learning_rate": 0.5}, "global_batch_size": 3}
    history = read_history(write_resolved(run, **changed))
    assert history.model.emb_dim == 64 and ("train.learning_rate", "0.5") in recipe(history)
    assert history.axes["tokens"].last == 10 * 3 * 32
    assert "x 64 wide" in dict(facts(history))["network"]


@pytest.mark.parametrize("template", [None, "turns"])
def test_only_text_has_bits_per_byte(tmp_path: Path, template: str | None) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["ab"] * 3)
    if template is not None:
        source.write_text('{"instruction": "a", "output": "b"}\n')
    write(tmp_path / "out", source, template=template, context_length=template and 64)
    run = write_resolved(write_run(tmp_path / "run", [start(), step(1)]), token_files=str(tmp_path / "out"))
    assert read_history(run).bits_per_nat == (pytest.approx(9 / 6 / math.log(2)) if template is None else None)


def test_changed_tokens_give_no_bits_per_byte(tmp_path: Path) -> None:
    manifest = write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["ab"] * 3))
    stream = {"directory": str(tmp_path / "out"), "tokens": 9, "sha256": [manifest.files["train.safetensors"].sha256]}
    run = write_run(tmp_path / "run", [start(), step(1)])
    write_resolved(run, token_files=str(tmp_path / "out"), train_stream=stream)
    assert read_history(run).bits_per_nat == pytest.approx(9 / 6 / math.log(2))
    shutil.rmtree(tmp_path / "out")
    write(tmp_path / "out", jsonl(tmp_path / "b.jsonl", ["a longer text"] * 3))
    assert read_history(run).bits_per_nat is None


def test_damaged_lines_do_not_affect_the_rest(tmp_path: Path) -> None:
    records = [start(), step(1, 4.0), step(2, math.nan, tokens_per_second=None), step(3, 2.0)]
    run = write_run(tmp_path / "run", records)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n[1]\n{"event": ["x"], "step": 3}\n{"step": 4, "train_lo')
    history = read_history(run)
    assert [str(note) for note in history.notes] == [
        f"NOTE: {run / 'metrics.jsonl'}: skipped 4 damaged lines, starting at line 5"
    ]
    job = take_run_lock(run)
    assert job.file is not None
    # While a job runs, the last line does not count as damaged, because the job may still be writing this line.
    assert "skipped 3 damaged lines" in read_history(run).notes[0].text
    job.file.close()
    assert history.curves["train_loss"].values.tolist() == pytest.approx([4.0, math.nan, 2.0], nan_ok=True)
    assert math.isnan(history.curves["tokens_per_second"].values[1])


@pytest.mark.parametrize(
    "damage",
    [
        *({"sources": value} for value in ([{}], "x", [{"dataset": "a", "tokens": "x", "epochs": 1.0}])),
        {"sources": [{"dataset": "a", "tokens": 1, "epochs": 10**400}]},
        *({"environment": value} for value in ([1], {"packages": [1]}, {"device": 5})),
        *({"price_per_hour": value} for value in ("x", math.nan, 10**400)),
        *({"tokenizer": value} for value in ("x", {"name": "x"})),
        *({name: "x"} for name in ("global_batch_size", "initial_weights", "steps")),
        *({name: 5} for name in ("token_files", "git_commit")),
        *({"token_files": [5]}, {"numerics": [1]}, {"train_stream": {"sha256": 5}}, {"model": {"n_heads": 7}}),
        None,
    ],
    ids=str,
)
def test_a_damaged_record_is_left_out_with_a_note(tmp_path: Path, damage: dict[str, Any] | None) -> None:
    run = write_resolved(write_run(tmp_path / "run", training()), **(damage or {}))
    if damage is None:
        (run / "resolved.json").write_text("{")
    history = read_history(run)
    [note] = history.notes
    assert str(note).startswith(f"NOTE: {run / 'resolved.json'}: damaged or edited, so it is not shown: ")
    assert history.record is None and len(report_page([run], [history], {})) > 10_000
    assert differing_settings([history, history]) == []
    record_samples(run)


def test_a_mixture_has_a_curve_for_each_dataset(tmp_path: Path) -> None:
    measured = {"step": 1, "validation_loss": 3.0, "validation_losses": {"code": 2.5, "prose": 3.5}}
    history = read_history(write_run(tmp_path / "run", [*training(10), measured]))
    assert history.curves["prose"].values.tolist() == [3.5]


def test_a_run_without_measurements_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no measurements yet"):
        read_history(write_run(tmp_path / "run", [start()]))
