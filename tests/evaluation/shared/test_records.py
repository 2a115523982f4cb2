"""Records and answers are read completely, or an error names the damaged record or answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from evaluation.shared.records import Answer, Answers, Record, check_folder, read_answers, read_records, write_answers

ROW = {"instruction": "Say it.", "output": "it"}
RECORD = Record(instruction="Say it.", input="", output="it")


def answers(**changes: Any) -> Answers:
    rows = [Answer(record=RECORD, text="é", reference_loss=loss) for loss in (1.5, None)]
    return Answers(**({"model": "run", "seed": 1, "home": None, "settings": {"epochs": 2}, "answers": rows} | changes))


def test_json_array_and_json_lines_give_equal_records(tmp_path: Path) -> None:
    for text in (json.dumps([ROW, ROW | {"input": "x"}]), f"{json.dumps(ROW)}\n{json.dumps(ROW | {'input': 'x'})}\n"):
        (tmp_path / "records").write_text("\ufeff" + text)
        assert read_records(tmp_path / "records") == [RECORD, Record(instruction="Say it.", input="x", output="it")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not JSON"),
        ("[]", "no records; wanted"),
        (json.dumps([ROW, {"instruction": "a"}]), "record 2: output: missing; correct or remove the record"),
        (json.dumps([ROW | {"output": " "}]), "record 1: output: empty"),
        (json.dumps([ROW | {"input": 3}]), "record 1: input: got 3, wanted a string"),
        (json.dumps([ROW | {"input": False}]), "record 1: input: got False, wanted a string"),
        (json.dumps([ROW | {"system": "Be brief."}]), "record 1: got 'system', which is not read"),
        (
            json.dumps([ROW | {"train": False}]),
            "record 1: got 'train': false, which excludes the record from training, but every record is used",
        ),
        *(
            (json.dumps([ROW, ROW | {key: "half \ud83d"}]), f"record 2: {key}: got half a surrogate pair")
            for key in ("instruction", "input", "output")
        ),
        (json.dumps([3]), "record 1: got int, wanted an object"),
        (f"{json.dumps(ROW)}\n{{", "line 2: not JSON"),
    ],
    ids=str,
)
def test_error_names_the_damaged_record(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "records"
    path.write_text(text)
    with pytest.raises(BadInput) as raised:
        read_records(path)
    assert str(raised.value).startswith(str(path)) and message in str(raised.value)


def test_unread_record_fields_are_noted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records"
    path.write_text(
        json.dumps([ROW | {"category": "c", "history": [], "input": None}, ROW | {"category": "d", "id": 0}])
    )
    assert read_records(path) == [RECORD, RECORD]
    assert (
        capsys.readouterr().err
        == f"NOTE: {path}: ignored fields, each with the number of records that have it: 'category' 2, 'id' 1\n"
    )


def test_written_answers_can_be_read_back(tmp_path: Path) -> None:
    for original in (answers(home=tmp_path), answers(model="run\udcff")):  # a name that is not UTF-8
        write_answers(tmp_path / "new" / "a.json", original)
        assert read_answers(tmp_path / "new" / "a.json") == original


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": []}, "wanted a file of answers"),
        ({"answers": [ROW]}, "answer 1: wanted a string as 'answer'"),
        ({"answers": [ROW | {"answer": "a", "reference_loss": True}]}, "a number or null as 'reference_loss'"),
        ({"answers": [ROW | {"answer": "a", "history": [1]}]}, "answer 1: got 'history', which is not read"),
        ({"seed": True}, "an integer as 'seed'"),
        ({"model": 3}, "wanted a string as 'model'"),
        ({"settings": None}, "an object as 'settings'"),
    ],
    ids=str,
)
def test_damaged_answers_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "a.json"
    write_answers(path, answers())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadInput, match=message):
        read_answers(path)


def test_unwritable_output_folder_error_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    with pytest.raises(BadInput, match="file/b: cannot be written: Not a directory; pass another --keep"):
        check_folder(tmp_path / "file" / "b", "--keep")
