"""The verdict store: files of earlier and later versions are read."""

import json
from pathlib import Path

import attrs
import pytest

from evaluation.judging.store import Asked, Reply, StoreLine, Usage, VerdictStore
from tests.evaluation.judging.sessions import PRICES, PROMPTS, Sessions, printed, read_store
from tests.judge_server import Judge


def test_what_a_later_version_has_noted_is_read_and_what_is_lost_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = Usage(input=5, output=7)
    reply = Reply(key="k", id="r", text="{}", refusal=None, usage=usage, batch=False)
    line = {"reply": attrs.asdict(reply) | {"new": 1, "usage": attrs.asdict(usage) | {"thought": 3}}}
    file = tmp_path / "verdicts.jsonl"
    file.write_text(json.dumps(line) + '\n{"reply": {"key"\n')
    store = VerdictStore(file)
    store.close()
    assert store.in_order == store.prompts["k"].replies == [reply]
    assert capsys.readouterr().out.startswith(f"NOTE: {file}: skipped 1 unreadable lines")


def test_what_replies_use_beyond_the_limit_does_not_compound(tmp_path: Path) -> None:
    store = VerdictStore(tmp_path / "verdicts.jsonl")
    for id, most in (("a", 100), ("b", 1000)):  # the second was noted at ten times the limit already
        most_used = Usage(input=10, output=most)
        store.append(
            StoreLine(asked=Asked(id=id, key=id, judge="j", answers=1, sent_bytes=10, limit=100, most=most_used))
        )
        usage = Usage(input=5, output=1000)
        reply = Reply(key=id, id=None, text="", refusal=None, usage=usage, batch=False, asked=id)
        store.append(StoreLine(reply=reply))
    store.close()
    assert [store.usage["j"].excess, read_store(store.path).usage["j"].excess] == [10, 10]


@pytest.mark.parametrize("usage", [None, {"cached_input": 10**7}, {"output": -5}, {"input": 10**30}])
def test_a_file_of_an_earlier_version_is_read_as_before(
    server: Judge, sessions: Sessions, usage: dict[str, int] | None
) -> None:
    assert sessions.run().returncode == 0
    old = [line for line in sessions.lines() if "reply" in line]
    for line in old:
        for key in ("asked", "model", "error", "cut"):
            del line["reply"][key]
    old[0]["reply"]["usage"] = None if usage is None else {**old[0]["reply"]["usage"], **usage}
    sessions.write(old)
    again = sessions.run()
    assert f"0 requests, {PROMPTS} already answered" in again.stdout
    assert "for 1 requests without an answer or count" in again.stdout
    assert printed(again.stdout) >= server.usd(PRICES)
