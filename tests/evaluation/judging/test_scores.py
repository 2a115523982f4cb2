"""Results and comments are kept once, never replaced by less, and compared as the session found them."""

import re
from pathlib import Path

from evaluation.comparison.compare import compare
from evaluation.judging.scores import JudgedCandidate, judged_difference
from evaluation.shared.significance import Interval
from tests.evaluation.comparison.stored import judged, rows_of
from tests.evaluation.judging.sessions import PROMPTS, Sessions
from tests.judge_server import Judge


def test_a_judgement_adds_one_result_and_no_less_complete_one(server: Judge, sessions: Sessions) -> None:
    for effort in ("low", "none", "low", "none"):
        done = sessions.run("--effort", effort)
        assert done.returncode == 0, done.stderr
    assert re.search(r"good: no result was added: that of \S+ leaves out 0 prompts, this one 0", done.stdout)
    complete = sessions.results.read_text()
    assert len(complete.splitlines()) == 2
    sessions.store.unlink()
    server.said.clear()
    server.faults = dict.fromkeys(range(8, PROMPTS), "400")
    done = sessions.run("--effort", "low")
    assert done.returncode == 1
    assert "7 of 15 prompts (47%) have no verdict, wanted at most 10 %: the result is not kept" in done.stderr
    server.every = "400"
    done = sessions.run("--effort", "low", "--allow-left-out", "50")
    assert done.returncode == 0, done.stderr
    assert "leaves out 0 prompts, this one 7" in done.stdout
    assert sessions.results.read_text() == complete


def test_the_judges_snapshot_and_comments_are_kept(server: Judge, sessions: Sessions) -> None:
    server.snapshot, server.faults = "scripted-2026-01-01", dict.fromkeys(range(8, PROMPTS), "400")
    assert sessions.run().returncode == 1  # too few for a result
    (comments,) = sessions.files[0].parent.glob("judged-by-scripted-????????.md")
    done = sessions.run()
    assert f"the judge's comments: {comments}" in done.stdout
    assert "answered by: scripted-2026-01-01" in done.stdout
    assert sessions.result()["judge_snapshots"] == ["scripted-2026-01-01"]
    text = comments.read_text()
    assert text.count("- 95: follows the instruction closely") == PROMPTS
    assert "## 1. Instruction 0" in text
    assert "**poor**, seed 0\n\n> poor says to 0: 40\n\n- 40: follows" in text
    assert sessions.run("--orders", "2", "--effort", "low").returncode == 0
    assert len(list(sessions.files[0].parent.glob("judged-by-*.md"))) == 2


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
