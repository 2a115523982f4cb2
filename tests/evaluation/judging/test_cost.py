"""Costs: prices, limits of a reply, and what counts before the server has counted."""

import json
from contextlib import closing
from pathlib import Path

import attrs
import pytest

from common.errors import BadInput
from evaluation.command_line import JudgeCommand
from evaluation.judging.judgement import Judgement
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
from tests.evaluation.judging.sessions import JUDGE, panel


def test_every_price_has_its_numbers_and_dated_versions_are_known() -> None:
    for model in json.loads(PRICES.read_text())["usd_per_million_tokens"]:
        price = read_price(PRICES, model)
        assert 0 < price.cached_input <= price.input < price.output
    assert read_price(PRICES, "gpt-5-mini-2025-08-07") == read_price(PRICES, "gpt-5-mini")
    assert read_price(PRICES, "gpt-4o-2024-05-13").input == 5
    with pytest.raises(BadInput, match=r"no price of 'gpt-5-mimi'; add .*; did you mean 'gpt-5-mini'\?"):
        read_price(PRICES, "gpt-5-mimi")
    used = Usage(input=3_000_000, cached_input=1_000_000, output=2_000_000)
    assert read_price(PRICES, "gpt-5-mini").of(used) == pytest.approx(2 * 0.25 + 0.025 + 2 * 2)


def test_a_request_counts_at_its_most_until_it_is_answered(tmp_path: Path) -> None:
    with closing(VerdictStore(tmp_path / "verdicts.jsonl")) as store:
        options = JudgeCommand(answers=("a",), orders=2)
        judgement = Judgement(panel(2, 1), JUDGE, store, read_price(PRICES, JUDGE.model), options)
        first, second = judgement.prompts
        asked = [
            attrs.evolve(judgement.request(prompt)[0], most=Usage(input=0, output=150_000))  # 0.3 dollars
            for prompt in (first, first, second)
        ]
        assert all(judgement.reserve(one) for one in asked)
        assert judgement.cost.usd == pytest.approx(0.9)
        reply = Reply(key=first.key, asked=asked[0].id, id="", text="", refusal=None, usage=None)
        judgement.take(attrs.evolve(reply, usage=Usage(input=0, output=25_000)))
        judgement.take(attrs.evolve(reply, asked=asked[1].id))
        assert (judgement.cost.counted, judgement.cost.open) == (pytest.approx(0.05), [pytest.approx(0.3)] * 2)
        judgement.release(asked[2], "never sent")
        judgement.release(asked[0], "of the answered ones this says nothing")
        assert judgement.cost.usd == pytest.approx(0.35)
        store.append(StoreLine(unbilled=["unknown"]))
        unpriced = Judgement(panel(2, 1), JUDGE, store, UNKNOWN_PRICE, options)
        assert unpriced.cost.usd == 0


def test_the_limit_of_a_reply_leaves_room_for_reasoning_and_doubles_where_it_was_cut(tmp_path: Path) -> None:
    with closing(VerdictStore(tmp_path / "verdicts.jsonl")) as store:
        judgement = Judgement(panel(2, 1), JUDGE, store, UNKNOWN_PRICE, JudgeCommand(answers=("a",)))
        prompt = judgement.prompts[0]
        asked, body = judgement.request(prompt)
        assert body["max_completion_tokens"] == asked.limit == asked.most.output == most_output(3, JUDGE) > 6000
        assert asked.most.input >= len(prompt.text)
        judgement.take(
            Reply(
                key=prompt.key, asked=asked.id, id="", text="", refusal=None, usage=Usage(input=1, output=1), cut=True
            )
        )
        assert judgement.request(prompt)[0].limit == 2 * asked.limit
    assert most_output(3, attrs.evolve(JUDGE, effort="high")) > 20_000
    assert most_output(3, attrs.evolve(JUDGE, effort="none")) < 1000
    assert most_output(3, attrs.evolve(JUDGE, model="gpt-4.1")) < 1000  # it does not reason
    silent = attrs.evolve(JUDGE, model="gpt-5.4-mini")  # nor that, by default
    assert expected_usage(400, 3, silent) == Usage(input=100, output=120)
    assert expected_usage(400, 3, JUDGE).output == 620
