"""A registered command has a column in the comparison, and statements about its measure."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from evaluation.command_line import COMMANDS, RegisteredCommand, SmokeCommand
from evaluation.comparison.compare import compare
from evaluation.shared.results import EvaluationResult, Measure, Measurement, Published
from evaluation.shared.significance import Interval
from tests.evaluation.comparison.stored import losses_on, rows_of, write


def rhymes_difference(a: list[int], b: list[int], _: float) -> Interval:
    value = a[0] - b[0]
    return Interval(value=value, low=value - 1, high=value + 1)


RHYMES = Measure(
    name="rhymes",
    unit="lines",
    digits=0,
    difference=rhymes_difference,
    published=Published(values={"Goethe": "12111"}, source="Faust"),
)


def read_results(record: dict[str, Any]) -> list[EvaluationResult]:
    """Read the results of the toy command. This function is here because this module is the command's `measures`."""
    measurement = Measurement(measure=RHYMES, value=record["rhymes"], error=1.0, sample=record["rhymes"])
    return [EvaluationResult.of(record, subject="sonnets", description="of 10 sonnets", measurements=[measurement])]


def test_a_registered_command_is_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "poetry", RegisteredCommand(SmokeCommand, __name__, measures=__name__))
    homes = [
        write(losses_on(tmp_path / name), "poetry", rhymes=rhymes)
        for name, rhymes in (("a", 12), ("b", 7))
    ]  # fmt: skip
    comparison = compare(rows_of(*homes))
    assert comparison.columns == ["model", "held-out loss", "bits/byte", "rhymes"]
    assert [row[-1].text for row in comparison.rows] == ["12 ± 1", "7 ± 1", "12111 [1]"]
    assert "rhymes: a is above b by 5 [4, 6] lines; no winner: the seed noise is unknown" in comparison.statements
    assert "poetry: of 10 sonnets" in comparison.notes and "[1] Faust" in comparison.notes


def test_results_of_removed_commands_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"acc": 0.2859, "acc_norm": 0.2955, "hits": "00", "hits_norm": "00"}
    home = write(losses_on(tmp_path / "a"), "hellaswag", data={"file": "x", "sha256": "h"}, items=8, completion=scores)
    assert compare(rows_of(home)).columns == ["model", "held-out loss", "bits/byte"]
    assert "damaged" not in capsys.readouterr().err


def test_registered_modules_exist() -> None:
    assert all(callable(import_module(entry.module).run) for entry in COMMANDS.values())
    named = [entry.measures for entry in COMMANDS.values() if entry.measures is not None]
    assert "evaluation.loss.loss_measures" in named and len(named) == len(set(named))
    assert all(callable(import_module(name).read_results) for name in named)
