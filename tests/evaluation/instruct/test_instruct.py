"""`evaluate.py instruct` scores the best epoch, reuses and resumes earlier work, and gives one-line errors."""

import json
import shutil
import signal
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from common.errors import BadInput
from evaluation.instruct.fine_tuning import answer_losses, make_example
from evaluation.instruct.instruct import IDENTITY, _refuse_other_folder, _settings_agree, _write, read_questions
from evaluation.shared.load import load
from evaluation.shared.model_location import locate
from evaluation.shared.records import Answer, Answers, read_answers, read_records, write_answers
from evaluation.shared.weights import WeightsIdentity
from tests import launch
from tests.conftest import ROOT, MakeRun, complete, shared
from tests.evaluation.comparison.stored import output_of, refused, results
from tests.evaluation.instruct.instructions import RECORDS, records


def instruct(*arguments: str | Path, ranks: int = 1) -> str:
    return output_of("instruct", *arguments, "--device", "cpu", ranks=ranks)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "records.json"
    path.write_text(json.dumps(RECORDS))
    return path


def test_split_matches_the_published_comparisons() -> None:
    everything = read_records(shared("instruction-data.json"))
    split = read_questions(shared("instruction-data.json"))
    assert [*split.train, *split.test, *split.validation] == everything
    assert (len(split.train), len(split.test), len(split.validation)) == (935, 110, 55)


@pytest.mark.slow
def test_answers_are_equal_on_any_number_of_ranks(make_run: MakeRun, data: Path) -> None:
    run = make_run(model={"context_length": 128, "drop_rate": 0.1}, min_train_tokens=8 * 128)
    complete(run)
    options = ("--data", data, "--epochs", "2", "--learning-rate", "3e-3", "--seeds", "2")
    contents = []
    for ranks in (1, 2, 3):
        shutil.rmtree(run / "answers", ignore_errors=True)  # otherwise, old answers would be reused
        done = instruct(run, *options, ranks=ranks)
        assert ", ± standard deviation over 2 seeds" in done
        contents.append({path.name: path.read_text() for path in (run / "answers").iterdir()})
    assert contents == [contents[0]] * 3
    first, second = (read_answers(path) for path in sorted((run / "answers").iterdir()))
    assert (first.model, first.seed, second.seed) == (f"run {run.joinpath('checkpoints/best').resolve().name}", 0, 1)
    assert [answer.record for answer in first.answers] == records()[34:38]
    assert first.settings["losses"] != second.settings["losses"]
    line, *later_lines = results(run)
    assert [later_line | {"time": line["time"]} for later_line in later_lines] == [line] * 2
    losses = [seed["reference_loss"] for seed in line["seeds"]]
    assert line["reference_loss"] == {"value": np.mean(losses), "spread": pytest.approx(np.std(losses, ddof=1))}


@pytest.mark.slow
def test_earlier_answers_and_runs_are_reused(make_run: MakeRun, data: Path, tmp_path: Path) -> None:
    run = make_run(model={"context_length": 128}, min_train_tokens=8 * 128)
    complete(run, "--max-steps", "1")

    def is_reused(*more: str | Path) -> list[bool]:
        done = instruct(run, "--data", data, "--epochs", "1", "--learning-rate", "3e-3", *more)
        return ["kept from an earlier session" in line for line in done.splitlines() if "seed " in line]

    assert is_reused() == [False]
    (answers,) = (run / "answers").iterdir()  # the temporary run was removed
    before = answers.read_bytes()
    folder = tmp_path / "tuned"
    assert is_reused("--keep", folder) == [False]  # so far, no run was kept with the answers
    assert answers.read_bytes() == before
    assert is_reused("--keep", folder) == [True]
    (tuned,) = folder.iterdir()
    loaded = load(locate(str(tuned), None), None, torch.device("cpu"))
    (answer, *_) = read_answers(answers).answers
    losses = answer_losses(loaded.network, make_example(loaded, records()[34]))
    assert float(losses.mean()) == pytest.approx(answer.reference_loss, rel=1e-5)
    why = refused("instruct", run, "--data", data, "--epochs", "1", "--keep", folder)
    assert f"{tuned}: exists, but belongs to another fine-tuning" in why


@pytest.mark.slow
def test_interrupted_fine_tuning_resumes(copied: Path, data: Path, tmp_path: Path) -> None:
    # There are so many epochs that even on a busy machine, the run is interrupted before its end.
    options = ("--data", data, "--epochs", "40", "--learning-rate", "1e-4")
    instruct(copied, *options, "--output", tmp_path / "whole")
    parts = (*options, "--output", tmp_path / "parts", "--keep", tmp_path / "kept")
    stopped = launch.start(ROOT / "evaluate.py", "instruct", str(copied), "--device", "cpu", *map(str, parts))
    launch.wait_until(lambda: [*tmp_path.glob("kept/*/checkpoints/step-*")], stopped)
    stopped.send_signal(signal.SIGINT)
    assert stopped.communicate(60)[1].splitlines()[-1] == "evaluate.py: interrupted; stored results are kept"
    assert stopped.returncode == 130
    (run,) = (tmp_path / "kept").iterdir()
    assert json.loads((run / "exit.json").read_text())["status"] == 75
    instruct(copied, *parts)
    (uninterrupted,), (resumed,) = (tmp_path / "whole").iterdir(), (tmp_path / "parts").iterdir()
    assert uninterrupted.read_bytes() == resumed.read_bytes()


def test_original_model_answers_if_tuning_does_not_help(copied: Path, data: Path, tmp_path: Path) -> None:
    output = instruct(copied, "--data", data, "--epochs", "1", "--learning-rate", "3", "--output", tmp_path)
    assert "best epoch 0" in output
    (answer, *_) = read_answers(next(tmp_path.glob("*seed-0.json"))).answers
    before = load(locate(str(copied), None), None, torch.device("cpu"))
    losses = answer_losses(before.network, make_example(before, records()[34]))
    assert float(losses.mean()) == pytest.approx(answer.reference_loss, rel=1e-6)


def test_unusable_records_are_refused(copied: Path, data: Path, tmp_path: Path) -> None:
    command = ("instruct", copied, "--data")
    assert "no/such.json: cannot be read" in refused(*command, "no/such.json", ranks=2)
    file = (data, "--output", data / "answers")
    assert "answers: cannot be written: Not a directory; pass another --output" in refused(*command, *file)
    for content, message in (
        (json.dumps([*RECORDS, {"instruction": "a"}]), "record 41: output: missing"),
        (json.dumps(RECORDS[:9]), "got 9 records, wanted 10 or more for"),
        (json.dumps(RECORDS[:10]), "pass a smaller number"),
    ):
        (tmp_path / "bad.json").write_text(content)
        options = ("--batch-size", "16") if "smaller" in message else ()
        assert message in refused(*command, tmp_path / "bad.json", *options)
    twice = refused("instruct", copied, copied, "--data", data)
    assert "MODEL: got run step-00000008, run step-00000008, wanted every model once" in twice
    assert not (copied / "evaluations.jsonl").exists()


def test_moved_answers_find_their_run(copied: Path, data: Path, tmp_path: Path) -> None:
    instruct(copied, "--data", data, "--epochs", "1", "--output", tmp_path / "elsewhere")
    (file,) = (tmp_path / "elsewhere").iterdir()
    home = read_answers(file).home
    assert home is not None and home.samefile(copied)
    (copied / "answers").mkdir(exist_ok=True)
    moved = copied.rename(tmp_path / "moved")
    assert read_answers(file).home is None
    assert read_answers(file.rename(moved / "answers" / file.name)).home == moved


def test_answers_of_another_model_are_never_replaced(copied: Path, data: Path, tmp_path: Path) -> None:
    original, output = tmp_path / "old" / copied.name, tmp_path / "output"
    shutil.copytree(copied, original, symlinks=True)
    title = f"{copied.name} {(copied / 'checkpoints' / 'best').resolve().name}"
    answers = [Answer(record=record, text="first", reference_loss=1.0) for record in records()[34:38]]
    file = output / f"{title.replace(' ', '-')}-seed-0.json"
    first = WeightsIdentity(values_sha256="a" * 64, files_sha256="b" * 64)
    write_answers(file, Answers(model=title, seed=0, home=original, settings={}, answers=answers, weights=first))
    before = file.read_bytes()
    why = refused("instruct", copied, "--data", data, "--output", output)
    assert f"{file}: contains the answers of another model with the same name as " in why
    assert f": the one in {original} (weights {'a' * 12}" in why
    assert file.read_bytes() == before


def test_answers_of_earlier_weights_are_archived(tmp_path: Path) -> None:
    file = tmp_path / "run-seed-0.json"
    answers = [Answer(record=records()[0], text="first", reference_loss=1.0)]
    settings = {"epochs": 2, "weights_sha256": "a" * 64, "losses": [2.0], "best_epoch": 0}
    first = Answers(model="run", seed=0, home=None, settings=settings, answers=answers)
    write_answers(file, first)
    before = file.read_bytes()
    _write(file, first)
    assert not (tmp_path / "archive").exists()  # answers with the same settings are replaced
    later = {"tokenizer_fingerprint": "f", "ordinary_added_tokens": ["<a>"], "given_tokenizer": None}
    assert _settings_agree(settings, settings | later)  # an older version did not record these settings
    assert _settings_agree(settings | later, settings | later)
    for key, value in (
        ("tokenizer_fingerprint", "g"),
        ("ordinary_added_tokens", []),
        ("given_tokenizer", {"name": "x"}),
    ):
        assert not _settings_agree(settings | later, settings | later | {key: value})
        assert not _settings_agree(settings | later | {key: value}, settings | later)
    _write(file, attrs.evolve(first, settings=settings | {"weights_sha256": "c" * 64}))
    assert read_answers(file).settings["weights_sha256"] == "c" * 64
    assert [path.read_bytes() for path in tmp_path.glob("archive/*/run-seed-0.json")] == [before]


def test_unknown_hidden_folder_is_not_removed(tmp_path: Path) -> None:
    run = tmp_path / ".run-seed-0"
    _refuse_other_folder(run)  # the folder does not exist
    run.mkdir()
    (run / f".partial-{IDENTITY}").touch()
    _refuse_other_folder(run)  # the folder has only the file of a session that was killed
    (run / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"contains notes.txt, but no fine-tuning run was started here; move it away"):
        _refuse_other_folder(run)
    (run / IDENTITY).write_text("{}")
    _refuse_other_folder(run)
