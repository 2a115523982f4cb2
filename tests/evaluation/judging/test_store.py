"""The verdict store prevents paying twice, even with older files; unknown costs count at their maximum."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import pytest

from common.errors import BadInput
from evaluation.command_line import JudgeCommand
from evaluation.judging import judge as judge_module
from evaluation.judging.judgment import Judgment
from evaluation.judging.prompt import make_prompts, read_panel
from evaluation.judging.store import (
    PRICES,
    UNKNOWN_PRICE,
    Reply,
    StoreLine,
    Usage,
    VerdictStore,
    expected_usage,
    most_output,
    read_price,
)
from tests.conftest import ROOT
from tests.evaluation.judging.sessions import (
    JUDGE,
    ORDERS,
    PROMPTS,
    Sessions,
    panel,
    printed,
    quality,
    read_store,
    run,
    write,
)
from tests.judge_server import Judge

MOST = {"input": 1539, "cached_input": 0, "cache_write": 1539, "output": 680}
ASKED = {"judge": "scripted default http://here/v1", "answers": 3, "sent_bytes": 1539, "limit": 680, "most": MOST}
EMPTY = Reply(key="", asked=None, id="", text="", refusal=None, usage=None)
USAGE = {"input": 389, "cached_input": 194, "cache_write": 0, "output": 97}


def verdict(scores: dict[str, int]) -> str:
    return json.dumps({"grades": [{"label": label, "comment": "", "score": score} for label, score in scores.items()]})


def request(id: str, key: str) -> dict[str, Any]:
    return {"id": id, "key": key, **ASKED, "batch": False}


def reply(id: str, key: str, text: str, usage: Any = USAGE) -> dict[str, Any]:
    fields = {"key": key, "id": "resp_1", "text": text, "refusal": None, "usage": usage, "batch": False, "asked": id}
    return {"reply": {**fields, "model": "scripted", "cut": False, "error": None}, "time": "2026-11-25T18:01:53Z"}


def test_store_of_2996586_is_read_without_repaying(server: Judge, sessions: Sessions) -> None:
    judge = attrs.evolve(JUDGE, model="scripted", base_url=server.url)
    prompts = make_prompts(read_panel(sessions.files, common=False), judge, ORDERS, 0)
    (uncounted, its_verdict), *direct = [(prompt.key, verdict(quality(json.loads(prompt.text)))) for prompt in prompts]
    lines: list[dict[str, Any]] = [
        {"batch": {"upload": "file-0", "id": "batch_0"}},
        {"batch_done": "file-0"},
        {"asked": request("u", uncounted)},
        reply("u", uncounted, its_verdict, None),
        {"asked": request("f", uncounted)},
        {"unbilled": ["f"], "why": "429: scripted 429"},
        {"asked": request("lost", uncounted)},
    ]
    for number, (key, reply_text) in enumerate(direct):
        lines += [{"asked": request(str(number), key)}, reply(str(number), key, reply_text)]
    sessions.store.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = sessions.said()
    assert f"0 requests, {PROMPTS} already answered" in again
    assert "NOTE" not in again
    assert server.billed == 0
    assert [row["score"] for row in sessions.result()["candidates"]] == [62, 42]
    dollars = (195 * 100 + 194 * 10 + 97 * 1000) / 1e6  # at the tests' prices
    most = (1539 * 100 + 680 * 1000) / 1e6
    assert printed(again) == pytest.approx(len(direct) * dollars + 2 * most, abs=1e-4)
    assert "for 2 requests without an answer or a token count" in again


def test_damaged_store_lines_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "verdicts.jsonl"
    file.write_text(json.dumps(reply("a", "k", "{}")) + '\n{"reply": {"key"\n')
    assert [stored.text for stored in read_store(file).replies] == ["{}"]
    assert capsys.readouterr().err.startswith(f"NOTE: {file}: skipped 1 damaged line, at line 2")


def test_prices_cover_dated_model_versions() -> None:
    for model in json.loads(PRICES.read_text())["usd_per_million_tokens"]:
        price = read_price(PRICES, model)
        assert 0 < price.cached_input <= price.input < price.output
    assert read_price(PRICES, "gpt-5-mini-2025-08-07") == read_price(PRICES, "gpt-5-mini")
    assert read_price(PRICES, "gpt-4o-2024-05-13").input == 5
    with pytest.raises(BadInput, match=r"no price for 'gpt-5-mimi'; add .*; did you mean 'gpt-5-mini'\?"):
        read_price(PRICES, "gpt-5-mimi")
    used = Usage(input=3_000_000, cached_input=1_000_000, output=2_000_000)
    assert read_price(PRICES, "gpt-5-mini").of(used) == pytest.approx(2 * 0.25 + 0.025 + 2 * 2)


def test_open_request_counts_at_its_maximum(tmp_path: Path) -> None:
    with closing(VerdictStore(tmp_path / "verdicts.jsonl")) as store:
        options = JudgeCommand(answers=("a",), orders=2)
        judgment = Judgment(panel(2, 1), JUDGE, store, read_price(PRICES, JUDGE.model), options)
        first, second = judgment.prompts
        requests = [
            attrs.evolve(judgment.request(prompt)[0], most=Usage(input=0, output=150_000))  # 0.3 dollars
            for prompt in (first, first, second)
        ]
        assert all(judgment.reserve(request) for request in requests)
        assert judgment.cost.usd == pytest.approx(0.9)
        reply = attrs.evolve(EMPTY, key=first.key, asked=requests[0].id)
        judgment.take(attrs.evolve(reply, usage=Usage(input=0, output=25_000)))
        judgment.take(attrs.evolve(reply, asked=requests[1].id))
        assert (judgment.cost.billed_usd, judgment.cost.open) == (pytest.approx(0.05), [pytest.approx(0.3)] * 2)
        judgment.release(requests[2], "never sent")
        judgment.release(requests[0], "already answered, so this has no effect")
        assert judgment.cost.usd == pytest.approx(0.35)
        store.append(StoreLine(unbilled=["unknown"]))
        unpriced = Judgment(panel(2, 1), JUDGE, store, UNKNOWN_PRICE, options)
        assert unpriced.cost.usd == 0


def test_reply_limit_doubles_after_a_cut_reply(tmp_path: Path) -> None:
    with closing(VerdictStore(tmp_path / "verdicts.jsonl")) as store:
        judgment = Judgment(panel(2, 1), JUDGE, store, UNKNOWN_PRICE, JudgeCommand(answers=("a",)))
        prompt = judgment.prompts[0]
        request, body = judgment.request(prompt)
        assert body["max_completion_tokens"] == request.limit == request.most.output == most_output(3, JUDGE) > 6000
        assert request.most.input >= len(prompt.text)
        judgment.take(attrs.evolve(EMPTY, key=prompt.key, asked=request.id, usage=Usage(input=1, output=1), cut=True))
        assert judgment.request(prompt)[0].limit == 2 * request.limit
    assert most_output(3, attrs.evolve(JUDGE, effort="high")) > 20_000
    assert most_output(3, attrs.evolve(JUDGE, effort="none")) < 1000
    assert most_output(3, attrs.evolve(JUDGE, model="gpt-4.1")) < 1000  # this model never reasons
    silent = attrs.evolve(JUDGE, model="gpt-5.4-mini")  # this model does not reason by default
    assert expected_usage(400, 3, silent) == Usage(input=100, output=120)
    assert expected_usage(400, 3, JUDGE).output == 620


def test_verdicts_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def open_store(path: Path) -> VerdictStore:
        opened.append(path)
        raise BadInput("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(judge_module, "VerdictStore", open_store)
    file = write(tmp_path, "good", 60)
    assert "enough" in run("judge", str(file), "--model", "scripted", "--base-url", "http://127.0.0.1:1/v1").stderr
    assert opened == [ROOT / "runs" / "verdicts.jsonl"]
