"""evaluate.py judge: what cannot be judged is one line; what needs no judge needs no options."""

import re
from pathlib import Path

import pytest

from common.errors import BadInput
from evaluation.judging import judge as judge_module
from tests import launch
from tests.conftest import ROOT
from tests.evaluation.judging.sessions import Sessions
from tests.judge_server import Judge


def test_what_no_judge_can_be_asked_for_is_one_line(server: Judge, sessions: Sessions, tmp_path: Path) -> None:
    def refused(*options: str) -> str:
        arguments = sessions.command(*options)
        done = launch.run(ROOT / "evaluate.py", *arguments, environment={"OPENAI_API_KEY": ""})
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        return done.stdout + done.stderr

    spoiled = tmp_path / "spoiled.json"
    spoiled.write_text("{")
    unset = refused("--base-url", "https://api.openai.com/v1")
    assert unset.startswith("evaluate.py: OPENAI_API_KEY: not set")  # before the scores that take a while
    assert "--base-url: got 'localhost:1'" in refused("--base-url", "localhost:1")
    assert "http://127.0.0.1:1/v1: no server: [Errno 111]" in refused("--base-url", "http://127.0.0.1:1/v1")
    ranks = launch.run(ROOT / "evaluate.py", *sessions.command(), environment=launch.RANK_OF_TWO)
    assert (ranks.returncode, "wanted one: python evaluate.py judge" in ranks.stderr) == (1, True)
    assert "no price of 'script'; add it to the file, or pass --prices; did you mean 'scripted'?" in refused(
        "--model", "script"
    )
    assert "spoiled.json: not JSON" in refused("--prices", str(spoiled))
    server.every = "401"
    assert f"{server.url}: 401: scripted 401" in refused()
    assert len(server.requests) <= 8
    server.every = "404"
    assert "404: scripted 404; does it have the Responses API? --api chat" in refused()


def test_without_a_judge_there_are_scores_all_the_same(sessions: Sessions) -> None:
    done = launch.run(ROOT / "evaluate.py", "judge", *map(str, sessions.files))
    assert done.returncode == 0, done.stderr
    assert "no judge was asked: name one with --model" in done.stdout
    assert re.search(r"good +1 +0\.0% +[\d.]+ ± [\d.]+ +2\.200 ± 0\.071", done.stdout)


def test_verdicts_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "VERDICTS", tmp_path / "repository" / "runs" / "verdicts.jsonl")
    monkeypatch.chdir(tmp_path)
    assert judge_module.default_store() == tmp_path / "repository" / "runs" / "verdicts.jsonl"
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "verdicts.jsonl").write_text("")
    with pytest.raises(BadInput, match=r"runs/verdicts.jsonl: holds verdicts, and so may .*; pass the one to use"):
        judge_module.default_store()
