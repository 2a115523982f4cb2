"""A judge's scores are compared as the session found them."""

from pathlib import Path

from evaluation.comparison.compare import compare
from evaluation.judging.score_measures import JudgedCandidate, judged_difference
from evaluation.shared.intervals import Interval
from tests.evaluation.comparison.stored import judged, rows_of


def test_of_one_fine_tuning_each_the_judge_finds_nobody_better(tmp_path: Path) -> None:
    clear = [{"a": "a", "b": "b", "value": -4.0, "low": -7.0, "high": -1.0}]
    homes = [judged(tmp_path / name, [20, 17, 23], clear, seeds=1) for name in "ab"]
    found = compare(rows_of(*homes))
    assert found.statements == [
        "judge's score: a and b cannot be ranked with one fine-tuning each: -4.00 [-7.00, -1.00] points"
    ]
    assert any("95 % intervals over questions only, of one fine-tuning each" in note for note in found.notes)


def test_judged_runs_in_folders_of_one_name_are_found_by_what_the_session_calls_them(tmp_path: Path) -> None:
    names = ["run (/one)", "run (/two)"]
    clear = [{"a": names[1], "b": names[0], "value": 4.0, "low": 1.0, "high": 7.0}]
    one, two = (
        judged(tmp_path / place / "run", [20, 17, 23], clear, candidate=name)
        for place, name in zip(("one", "two"), names, strict=True)
    )
    found = compare(rows_of(one, two))
    assert found.statements[0].startswith(f"judge's score: {one}: run is below {two}: run by 4.00 [1.00, 7.00] points")


def test_of_several_candidates_a_side_it_is_the_mean_of_their_differences() -> None:
    pairs = {
        ("a", "c"): Interval(value=4, low=1, high=7),
        ("b", "c"): Interval(value=2, low=0, high=4),
    }
    a, b, c = (JudgedCandidate(name=name, differences=pairs) for name in "abc")
    assert judged_difference([a, b], [c], 0.95) == Interval(value=3, low=0.5, high=5.5)
    assert judged_difference([a], [b], 0.95) is None
