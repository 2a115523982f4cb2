"""References are written from finished runs of a recipe, and used for runs of the same recipe on the same tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from reporting.command import ReportCommand
from reporting.command import run as report
from reporting.reference_runs import write_reference
from reporting.report_page import report_page
from reporting.run_history import read_history
from tests.conftest import MakeRun, train
from tests.reporting.written_runs import step, write_resolved, write_run
from training.checkpoints.run_record import read_record
from training.reference import compare

STREAM = {"tokens": 9, "sha256": ["a"]}
STEPS = 200


def finished_run(place: Path, seed: int, loss: float = 3.0, **resolved: Any) -> Path:
    run = write_run(place, [step(at, loss + 2 / at + 0.01 * ((at + seed) % 7)) for at in range(1, STEPS + 1)])
    train = {"random_seed": seed} | resolved.pop("train", {})
    return write_resolved(run, **{"steps": STEPS, "train_stream": STREAM, "train": train} | resolved)


def reference_in(tmp_path: Path) -> list[Path]:
    runs = [finished_run(tmp_path / f"run-{seed}", seed) for seed in range(1, 4)]
    report(ReportCommand(runs=tuple(runs), reference=runs[0]))
    return runs


def problem(run: Path, reference: Path) -> str:
    shutil.copy(reference / "reference.json", run)
    record = read_record(run)
    assert record is not None
    return str(compare(run, record, {}).line).removeprefix(
        f"NOTE: {run / 'reference.json'}: the loss is not compared: "
    )


def test_a_run_is_compared_and_differences_are_named(tmp_path: Path) -> None:
    first = reference_in(tmp_path)[0]
    high = finished_run(tmp_path / "high", 9, loss=4.0, train={"microbatch_size": 4})
    assert (
        problem(high, first) == f"band         of 3 runs on a machine that is not recorded: {high / 'reference.json'}"
    )
    page = report_page([high], [read_history(high)], {})
    assert "training loss above the band of 3 runs of this recipe" in page
    constant = finished_run(tmp_path / "constant", 9, train={"schedule_learning_rate": False, "learning_rate": 0.001})
    message = problem(constant, first)
    assert "learning_rate is 0.001, but 0.004 in the reference" in message
    assert "schedule_learning_rate is false, but true in the reference" in message
    rarely = finished_run(tmp_path / "rarely", 9, train={"log_interval": 100})
    assert problem(rarely, first) == "log_interval is 100, but 10 in the reference"
    tokens = finished_run(tmp_path / "tokens", 9, train_stream={"tokens": 9, "sha256": ["b"]})
    assert problem(tokens, first) == "the reference is not for these tokens"


def stream_of(place: Path, name: str, source: str) -> dict[str, object]:
    """Write the manifest of a token directory, and return the stream of a run that read this directory."""
    folder = place / f"tokens-{name}"
    folder.mkdir()
    tokenizer = {"name": "bytes", "vocabulary_size": 257, "end_of_text_id": 256, "ranks_file": None}
    sources = [{"name": source, "files": 1, "bytes": 1}]
    file = {"size_bytes": 1, "sha256": name, "max_id": 1, "tokens": 1, "dtype": "uint16"}
    manifest = {"format": 1, "documents": 1, "tokens": 1, "tokenizer": tokenizer, "sources": sources}
    manifest |= {"files": {"train.safetensors": file}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return STREAM | {"directory": str(folder), "sha256": [name]}


def test_three_token_files_make_a_reference_for_others(tmp_path: Path) -> None:
    def on(name: str, source: str = "stdlib") -> dict[str, object]:
        return stream_of(tmp_path, name, source)

    runs = [finished_run(tmp_path / name, 1, train_stream=on(name)) for name in ("3.10", "3.12", "3.13")]
    write_reference(runs, runs[0])
    assert problem(finished_run(tmp_path / "3.14", 1, train_stream=on("3.14")), runs[0]).startswith("band ")
    text = finished_run(tmp_path / "text", 1, train_stream=on("text", "my text"))
    assert problem(text, runs[0]) == "the reference is not for these tokens"
    with pytest.raises(BadInput, match="text: its recipe or its tokens differ from those of"):
        write_reference([*runs, text], runs[0])


@pytest.mark.parametrize("recorded", ["owner/words", "hf:owner/words", "hf:owner/words:small"])
def test_hub_tokens_may_be_prepared_again(tmp_path: Path, recorded: str) -> None:
    """Manifests and references of earlier versions name a dataset on the hub with or without the prefix hf:."""
    named = [recorded, recorded, f"hf:{recorded.removeprefix('hf:')}"]
    runs = [
        finished_run(tmp_path / f"run-{number}", 1, train_stream=stream_of(tmp_path, str(number), name))
        for number, name in enumerate(named)
    ]
    write_reference(runs, runs[0])
    file = runs[0] / "reference.json"
    stored = json.loads(file.read_text())
    for number, name in enumerate((recorded, recorded.removeprefix("hf:"), "other/words")):
        file.write_text(json.dumps(stored | {"prepared": f"{recorded} as bytes"}))
        stream = stream_of(tmp_path, f"again-{number}", name)
        again = finished_run(tmp_path / f"again-run-{number}", 1, train_stream=stream)
        message = problem(again, runs[0])
        assert (
            message == "the reference is not for these tokens" if name == "other/words" else message.startswith("band ")
        )


def test_runs_unfit_for_a_reference_are_errors(tmp_path: Path) -> None:
    first, second, third = reference_in(tmp_path)
    with pytest.raises(BadInput, match="or different tokens; got 2 runs"):
        write_reference([first, second], first)
    with pytest.raises(BadInput, match="at least 3 runs, each with a different seed or different tokens; got 3 runs"):
        write_reference([first, second, finished_run(tmp_path / "again", 1)], first)
    with pytest.raises(BadInput, match="other: its recipe or its tokens differ"):
        write_reference([first, second, finished_run(tmp_path / "other", 4, train={"learning_rate": 1})], first)
    change = {"step": 3, "key": "learning_rate", "old": 1, "new": 2}
    unfit: dict[str, dict[str, Any]] = {"short": {"steps": STEPS + 1}, "changed": {"changes": [change]}}
    for name, broken in unfit.items():
        with pytest.raises(BadInput, match=f"{name}: cannot be part of a reference: the run must be finished"):
            write_reference([first, second, third, finished_run(tmp_path / name, 4, **broken)], first)


def test_a_damaged_reference_changes_no_bits(finished: Path, make_run: MakeRun) -> None:
    run = make_run()
    (run / "reference.json").write_text("{")
    note = f"NOTE: {run / 'reference.json'}: the loss is not compared: not JSON at line 1, column 2"
    assert train(run).stderr.count(note) == 1
    last = Path("checkpoints", "latest", "model.safetensors")
    assert (run / last).read_bytes() == (finished / last).read_bytes()


def test_replacing_a_reference_prints_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = reference_in(tmp_path)
    path = runs[0] / "reference.json"
    size = f"{path.stat().st_size:,} bytes"
    capsys.readouterr()
    report(ReportCommand(runs=tuple(runs), reference=runs[0]))
    note = f"NOTE: {path}: replaced an earlier reference ({size})\n"
    assert capsys.readouterr() == (f"reference {path}\n", note)
    path.write_text('{"papers": []}')
    with pytest.raises(BadInput, match=r"is not a reference of report.py, so it was not overwritten \(14 bytes\)"):
        report(ReportCommand(runs=tuple(runs), reference=runs[0]))
    assert path.read_text() == '{"papers": []}'
