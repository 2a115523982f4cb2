"""Results and comments are kept once, and never replaced by less."""

import re
from pathlib import Path

from tests.evaluation.judging.sessions import PROMPTS, judge, result, store_path
from tests.judge_server import Judge


def test_refused_prompts_make_no_result_and_replace_no_complete_one(server: Judge, files: list[Path]) -> None:
    assert judge(server, files).returncode == 0
    complete = (files[0].parent.parent / "evaluations.jsonl").read_text()
    store = store_path(files)
    store.unlink()
    server.prompts.clear()
    server.faults = dict.fromkeys(range(8, PROMPTS), "400")
    done = judge(server, files)
    assert done.returncode == 1
    assert "7 of 15 prompts (47%) have no verdict, wanted at most 10 %: the result is not kept" in done.stderr
    server.every = "400"
    done = judge(server, files, "--allow-left-out", "50")
    assert done.returncode == 0, done.stderr
    assert re.search(r"good: no result was added: that of \S+ leaves out 0 prompts, this one 7", done.stdout)
    assert (files[0].parent.parent / "evaluations.jsonl").read_text() == complete


def test_a_finished_judgement_adds_no_second_result(server: Judge, files: list[Path]) -> None:
    assert judge(server, files).returncode == 0
    again = judge(server, files)
    assert again.returncode == 0, again.stderr
    assert "good: no result was added: that of" in again.stdout
    assert len((files[0].parent.parent / "evaluations.jsonl").read_text().splitlines()) == 1


def test_the_judges_snapshot_and_comments_are_kept(server: Judge, files: list[Path]) -> None:
    server.snapshot = "scripted-2026-01-01"
    done = judge(server, files)
    assert "answered by: scripted-2026-01-01" in done.stdout
    assert result(files[0])["judge_snapshots"] == ["scripted-2026-01-01"]
    (comments,) = files[0].parent.glob("judged-by-scripted-????????.md")
    assert f"the judge's comments: {comments}" in done.stdout
    text = comments.read_text()
    assert text.count("- 95: follows the instruction closely") == PROMPTS
    assert "## 1. Instruction 0" in text
    assert "**poor**, seed 0\n\n> poor says to 0: 40\n\n- 40: follows" in text


def test_comments_are_written_whenever_there_are_some(server: Judge, files: list[Path]) -> None:
    server.faults = dict.fromkeys(range(8, PROMPTS), "400")
    done = judge(server, files)
    assert done.returncode == 1  # too few for a result
    (comments,) = files[0].parent.glob("judged-by-*.md")
    assert f"the judge's comments: {comments}" in done.stdout
    assert judge(server, files).returncode == 0
    comments.unlink()
    assert judge(server, files).returncode == 0
    assert comments.exists()
    assert judge(server, files, "--orders", "2", "--effort", "low").returncode == 0
    assert len(list(files[0].parent.glob("judged-by-*.md"))) == 2


def test_another_judgement_between_adds_no_second_result(server: Judge, files: list[Path]) -> None:
    results = files[0].parent.parent / "evaluations.jsonl"
    for effort in ("low", "none", "low", "none"):
        assert judge(server, files, "--effort", effort).returncode == 0
    complete = results.read_text()
    assert len(complete.splitlines()) == 2
    (store_path(files)).unlink()
    server.faults = {0: "400"}
    server.prompts.clear()
    done = judge(server, files, "--effort", "low")
    assert "leaves out 0 prompts, this one 1" in done.stdout
    assert results.read_text() == complete
