"""The verdict store: files that version 2996586 wrote are read, and nothing in them is paid for again."""

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.judging.prompt import Judge as WhoIsAsked
from evaluation.judging.prompt import make_prompts, read_panel
from tests.evaluation.judging.sessions import ORDERS, PROMPTS, Sessions, printed, quality, read_store
from tests.judge_server import Judge

MOST = {"input": 1539, "cached_input": 0, "cache_write": 1539, "output": 680}
ASKED = {
    "judge": "scripted default http://127.0.0.1:1/v1",
    "answers": 3,
    "sent_bytes": 1539,
    "limit": 680,
    "most": MOST,
}
USAGE = {"input": 389, "cached_input": 194, "cache_write": 0, "output": 97}


def verdict(scores: dict[str, int]) -> str:
    return json.dumps({"grades": [{"label": label, "comment": "", "score": score} for label, score in scores.items()]})


def asked(id: str, key: str, *, batch: bool = False) -> dict[str, Any]:
    return {"id": id, "key": key, **ASKED, "batch": batch}


def reply(id: str, key: str, text: str, usage: Any = USAGE, *, batch: bool = False) -> dict[str, Any]:
    said = {"key": key, "id": "resp_1", "text": text, "refusal": None, "usage": usage, "batch": batch, "asked": id}
    return {"reply": {**said, "model": "scripted", "cut": False, "error": None}, "time": "2026-11-25T18:01:53Z"}


def test_a_file_of_2996586_is_read_and_not_paid_for_again(server: Judge, sessions: Sessions) -> None:
    judge = WhoIsAsked(model="scripted", effort=None, base_url=server.url)
    prompts = make_prompts(read_panel(sessions.files, common=False), judge, ORDERS, 0, rotated=True)
    assert prompts[0].order == (0, 2, 1)  # as that version asked
    verdicts = [(one.key, verdict(quality(json.loads(one.text)))) for one in prompts]
    (of_batch, text), (uncounted, other), *direct = verdicts
    handed_over = {"upload": "file-0", "base_url": server.url, "keys": [of_batch]}
    handed_over["asked"] = [asked("b", of_batch, batch=True)]
    lines: list[dict[str, Any]] = [
        {"batch": {**handed_over, "id": None}},
        {"batch": {**handed_over, "id": "batch_0"}},
        reply("b", of_batch, text, batch=True),
        {"batch_done": "file-0"},
        {"asked": asked("u", uncounted)},
        reply("u", uncounted, other, None),
        {"asked": asked("f", uncounted)},
        {"unbilled": ["f"], "why": "429: scripted 429"},
        {"asked": asked("lost", uncounted)},
    ]
    for number, (key, said) in enumerate(direct):
        lines += [{"asked": asked(str(number), key)}, reply(str(number), key, said)]
    sessions.store.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = sessions.said()
    assert f"0 requests, {PROMPTS} already answered" in again
    assert "NOTE" not in again
    assert server.billed == 0
    assert [row["score"] for row in sessions.result()["candidates"]] == [62, 42]
    dollars = (195 * 100 + 194 * 10 + 97 * 1000) / 1e6  # at the prices of the tests
    most = (1539 * 100 + 680 * 1000) / 1e6
    assert printed(again) == pytest.approx((len(direct) + 1) * dollars + 2 * most, abs=1e-4)
    assert "for 2 requests without an answer or count" in again


def test_what_is_lost_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "verdicts.jsonl"
    file.write_text(json.dumps(reply("a", "k", "{}")) + '\n{"reply": {"key"\n')
    assert [one.text for one in read_store(file).replies] == ["{}"]
    assert capsys.readouterr().out.startswith(f"NOTE: {file}: skipped 1 unreadable lines")
