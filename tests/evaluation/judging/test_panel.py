"""Answer files: which are judged together, on which questions."""

import json
from pathlib import Path

import pytest

from common.errors import BadInput
from evaluation.judging.prompt import find_files, read_panel
from evaluation.shared.results import append_result
from tests.evaluation.judging.sessions import Sessions, write


def test_answers_that_cannot_be_judged_together_are_one_line(sessions: Sessions, tmp_path: Path) -> None:
    def refused(*names: Path, common: bool = False) -> str:
        with pytest.raises(BadInput) as found:
            read_panel(find_files(list(map(str, names))), common=common)
        assert "\n" not in str(found.value)
        return str(found.value)

    good, poor = sessions.files
    other = write(tmp_path, "other", 50, questions=range(3, 9))
    far = write(tmp_path, "far", 50, questions=range(20, 25))
    assert f"{other}: questions differ from {good}: 5 and 6, 2 shared; --common judges" in refused(good, other)
    assert "no overlap" in refused(good, far, common=True)
    assert len(read_panel([good, other], common=True).questions) == 2
    assert "two files of 'good' with the same seed" in refused(good, copy(good, "again.json"))
    assert "absent.json: no such file" in refused(tmp_path / "absent.json")
    assert "no answers; write them with evaluate.py instruct" in refused(tmp_path)
    assert "answer 2: output: missing" in refused(copy(good, "cut.json", drop="output"), poor)
    longer = write(tmp_path, "good", 60, seed=1)
    longer.write_text(longer.read_text().replace('"epochs": 2', '"epochs": 3'))
    differ = f"{longer}: settings differ from {good}: epochs 3 and 2; fine-tune all seeds alike, or pass files"
    assert differ in refused(good, longer)
    twin = write(tmp_path / "elsewhere", "good", 50)
    titles = [candidate.title for candidate in read_panel([good, twin], common=False).candidates]
    assert titles == [f"good ({tmp_path / 'elsewhere' / 'good'})", f"good ({tmp_path / 'good'})"]


def copy(file: Path, name: str, drop: str | None = None) -> Path:
    """Write the same answers once more; `drop`: a field that the second one lacks."""
    value = json.loads(file.read_text())
    value["answers"][1].pop(drop, None)
    (file.parent / name).write_text(json.dumps(value))
    return file.parent / name


def test_of_a_run_only_one_checkpoint_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "checkpoints" / "latest").symlink_to("step-1")
    (run / "answers").mkdir()
    first, second = [
        write(tmp_path, f"run step-{step}", 50).rename(run / "answers" / f"{step}.json") for step in (1, 2)
    ]
    assert find_files([str(run / "checkpoints" / "latest")]) == [first]
    with pytest.raises(BadInput, match="answers of run step-1, run step-2, and no record of which is the newest; pass"):
        find_files([str(run)])
    for step in (1, 2):
        append_result(run, f"run step-{step}", "instruct", {})
    assert capsys.readouterr().out == ""
    assert find_files([str(run)]) == [second]
    assert capsys.readouterr().out == f"{run}: using the answers of run step-2, not of run step-1\n"
    (run / "checkpoints" / "step-3").mkdir()
    with pytest.raises(BadInput, match="no answers of step-3; write them"):
        find_files([str(run / "checkpoints" / "step-3")])
