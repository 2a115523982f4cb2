"""The key `measure` of a sweep: all variants are measured on the same text, and no variant may be trained on it."""

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest

from common.errors import BadInput
from experiments.sweep.measured_loss import MEASURED, check_unseen, measure_run, read_measure, texts_of
from experiments.sweep.sweep_file import read_sweep
from tests import launch
from tests.conftest import ROOT, MakeRun
from tests.experiments.conftest import MakeSweep
from training.config.train_config import TrainConfig, load_run

FILE = Path("sweep.json")
TEXTS = [f"Document {number} is encoded again, whole: {number * number}.\n" * 9 for number in range(12)]


@pytest.fixture(scope="session")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return token files with a different tokenizer. Two of the twelve documents are held out."""
    folder = tmp_path_factory.mktemp("characters")
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    options = ("--tokenizer", "chars", "--split", "tail", "--validation-fraction", "0.2", "--executor", "inline")
    launch.run(
        ROOT / "prepare_data.py", f"{folder}/texts.jsonl", "--output", f"{folder}/tokens", *options
    ).check_returncode()
    return folder / "tokens"


def entry(directory: Path, **keys: Any) -> dict[str, Any]:
    return {"dataset": str(directory), "count": 2000} | keys


def trained_on(train: TrainConfig, directory: Path) -> TrainConfig:
    return attrs.evolve(train, data=attrs.evolve(train.data, dataset=str(directory)))


def test_a_run_is_measured_once_on_each_range(copied: Path, token_files: Path) -> None:
    train = load_run(copied, ()).train
    measure = read_measure(FILE, [entry(token_files), entry(token_files, weight=3, **{"from": 6000})], [train])
    assert measure is not None and measure.same_ids and measure.unit == "nats per token"
    assert measure_run(measure, copied, 8, train, None) is None
    losses = measure_run(measure, copied, 8, train, "cpu")
    assert losses is not None and measure.mean(losses) == pytest.approx((losses[0] + 3 * losses[1]) / 4)
    shutil.rmtree(copied / "checkpoints")
    assert measure_run(measure, copied, 8, train, None) == losses


def test_other_tokenizers_are_measured_in_bits_per_byte(copied: Path, characters: Path) -> None:
    train = load_run(copied, ()).train
    measure = read_measure(FILE, {"dataset": str(characters)}, [train])
    assert measure is not None and measure.unit == "bits per byte" and texts_of(measure.ranges[0]) == TEXTS[-2:]
    losses = measure_run(measure, copied, 8, train, "cpu")
    (stored,) = [line for line in (copied / "evaluations.jsonl").read_text().splitlines() if MEASURED in line]
    assert json.loads(stored)["text_bytes"] == len("".join(TEXTS[-2:])) and losses == [
        json.loads(stored)["bits_per_byte"]
    ]


def test_training_on_the_measured_text_is_refused(copied: Path, token_files: Path, characters: Path) -> None:
    train = load_run(copied, ()).train
    measure = read_measure(FILE, {"dataset": str(token_files), "split": "train"}, [train])
    assert measure is not None
    with pytest.raises(BadInput, match=r"its training tokens contain 100\.0% of the measured text .* \(compared in"):
        check_unseen(measure, [train])
    other_measure = read_measure(FILE, {"dataset": str(characters), "split": "train"}, [train])
    assert other_measure is not None
    check_unseen(other_measure, [train])
    with pytest.raises(BadInput, match="its training tokens contain"):
        check_unseen(other_measure, [trained_on(train, characters)])


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"dataset": "nowhere"}, "nowhere: no "),
        ({"split": "validation"}, "measure: key 'dataset' is missing"),
        ({"dataset": "x", "form": 3}, "measure: unknown key 'form'; did you mean 'from'?"),
        ([3], "measure: got 3, wanted an object"),
        ([], "measure: the list is empty; add at least one range"),
        ({"dataset": "x", "weight": 0}, "measure: weight: got 0, wanted"),
    ],
)
def test_an_invalid_measure_is_reported_in_one_line(value: Any, problem: str) -> None:
    with pytest.raises(BadInput) as error:
        read_measure(FILE, value, [])
    assert problem in str(error.value)


def test_data_is_a_lever_only_with_a_measure(
    make_sweep: MakeSweep, make_run: MakeRun, token_files: Path, characters: Path
) -> None:
    levers = {"other": {"train.dataset": str(characters)}}
    base = make_run("base")
    sweep = read_sweep(make_sweep(base, levers=levers, measure=entry(token_files)))
    assert sweep.measure is not None and not sweep.measure.same_ids and len(sweep.variants) == 2
    with pytest.raises(BadInput, match=r"train\.dataset: cannot be a lever, .* or add 'measure' to the file"):
        read_sweep(make_sweep(base, levers=levers))
    with pytest.raises(BadInput, match="halving: cannot be combined with 'measure'"):
        read_sweep(make_sweep(base, measure=entry(token_files), halving={"factor": 2, "rungs": [0.5]}))


def test_dataset_weights_are_levers_with_a_measure(
    make_sweep: MakeSweep, make_run: MakeRun, token_files: Path, characters: Path
) -> None:
    weights = [{"dataset": str(token_files), "weight": 3}, {"dataset": str(characters), "weight": 1}]
    alone = [{"dataset": str(characters), "weight": 1}]
    levers = {"mostly-code": {"train.dataset": weights}, "other-alone": {"train.dataset": alone}}
    sweep = read_sweep(make_sweep(make_run("base"), levers=levers, measure=entry(token_files)))
    parts = [variant.run.train.data.parts for variant in sweep.variants]
    assert [variant.name for variant in sweep.variants] == ["base", "mostly-code", "other-alone"]
    datasets = [[part.dataset for part in sources] for sources in parts]
    assert datasets == [[str(token_files)], [str(token_files), str(characters)], [str(characters)]]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"from": -1}, "measure: from: got -1, wanted an integer of at least 0, at most 2^53"),
        ({"from": "x"}, "measure: from: got 'x', wanted an integer of at least 0, at most 2^53"),
        ({"count": 0}, "measure: count: got 0, wanted an integer of at least 1, at most 2^53"),
        ({"start": 5}, "measure: unknown key 'start'"),
    ],
)
def test_measure_errors_name_keys_of_the_file(token_files: Path, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput) as error:
        read_measure(FILE, entry(token_files, **keys), [])
    assert str(error.value).startswith(f"{FILE}: {problem}")


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -1.0, "3", True, None])
def test_an_invalid_stored_loss_is_an_error(tmp_path: Path, token_files: Path, loss: object) -> None:
    train = load_run(ROOT / "runs" / "quickstart", ()).train
    measure = read_measure(FILE, [entry(token_files)], [trained_on(train, token_files)])
    assert measure is not None
    line = {"evaluation": "loss", "model": f"{tmp_path.name} step-00000008", "range": measure.ranges[0].identity()}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(line | {"nats_per_token": loss}) + "\n")
    with pytest.raises(
        BadInput, match=r"evaluations.jsonl: nats_per_token: got .* in the last result on .*, expected a number of at"
    ):
        measure_run(measure, tmp_path, 8, train, None)
