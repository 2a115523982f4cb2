"""Bars of time and cost: one scale, one colour for each part, and every part has a visible amount."""

from pathlib import Path

import attrs
import pytest

from reporting.ledger_bars import LedgerBar, ledger_bars, usd_text
from reporting.run_history import RunHistory, read_history
from tests.reporting.written_runs import training, write_run


@pytest.fixture
def history(tmp_path: Path) -> RunHistory:
    return read_history(write_run(tmp_path / "run", training()))


def bar(history: RunHistory, **parts: float) -> LedgerBar:
    [found] = ledger_bars([attrs.evolve(history, ledger=parts)])
    return found


def test_a_part_has_one_colour_whatever_other_parts_there_are(history: RunHistory) -> None:
    styles = {part.name: part.style for part in bar(history, compile=1.0, training=2.0, lost=3.0).parts}
    assert styles == {part.name: part.style for part in bar(history, training=2.0, lost=3.0).parts} | {
        "compile": "part-2"
    }
    assert len(set(styles.values())) == 3


def test_a_bar_is_at_most_whole_even_with_a_part_below_zero(history: RunHistory) -> None:
    found = bar(history, training=10.0, lost=-5.0)
    assert [(part.share, part.seconds) for part in found.parts] == [(1.0, "10 s"), (0.0, "-5 s")]
    assert found.seconds == "5 s" and not found.lost


def test_bars_of_several_runs_have_one_scale(history: RunHistory) -> None:
    runs = [attrs.evolve(history, ledger={"training": seconds}) for seconds in (13.0, 45.0)]
    runs.append(attrs.evolve(history, ledger={}))
    assert [round(found.length, 3) for found in ledger_bars(runs)] == [0.289, 1.0, 0.0]


def test_dollars_of_a_part_have_the_digits_of_the_total(history: RunHistory) -> None:
    found = ledger_bars([attrs.evolve(history, ledger_usd=0.01376)])[0]
    assert [part.usd for part in found.parts] == ["$0.00055", "$0.01238", "$0.00083"] and found.usd == "$0.01376"
    assert usd_text(3.0, 1234.5) == "$3.00" and usd_text(0.001, 1234.5) == "< $0.01" and usd_text(None, None) == ""
