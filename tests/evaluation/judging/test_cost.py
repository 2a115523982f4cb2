"""The budget: --max-usd holds by the server's own bill, and no printed cost is below it."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import attrs
import pytest

from evaluation.judging.cost import JudgeBudget, expected_usage, most_output
from evaluation.judging.prices import PRICES as PRICE_TABLE
from evaluation.judging.prices import UNKNOWN_PRICE, read_price
from evaluation.judging.prompt import make_prompts
from evaluation.judging.replies import read_reply
from evaluation.judging.store import Asked, StoreLine, Usage, VerdictStore
from tests.evaluation.judging.sessions import JUDGE, PRICES, PROMPTS, SILENT, Result, Sessions, panel, printed
from tests.judge_server import Judge


def test_no_more_is_spent_than_allowed(server: Judge, sessions: Sessions, faultless: Result) -> None:
    silent = ("--effort", "none", "--concurrency", "1")  # a little may be said, nothing thought
    refused = sessions.run(*silent, "--max-usd", "0.5")
    assert refused.returncode == 1
    assert "--max-usd: got 0.5, and 15 requests may cost about $" in refused.stderr
    assert server.requests == []
    estimate = float(re.findall(r"about \$([\d.]+)", refused.stderr)[0])
    server.faults, server.wrong_again = dict.fromkeys((0, 2, 4, 6, 8, 10), "wrong labels"), True  # dearer than planned
    done = sessions.run(*silent, "--max-usd", str(estimate * 1.05))
    spent = float(re.findall(r"sessions: \$([\d.]+)", done.stdout)[0])
    assert (done.returncode, done.stderr) == (75, "")
    assert estimate * 0.6 < spent <= estimate * 1.05
    assert spent == pytest.approx(server.usd(PRICES), abs=1e-4)
    assert re.search(r"verdicts are missing, and the next one may cost up to \$0\.\d+; nothing is lost", done.stdout)
    server.wrong_again, billed = False, server.billed
    again = sessions.run(*silent, "--max-usd", str(spent + 0.1))
    assert (again.returncode, server.billed) == (1, billed)  # "in all" counts what was paid before
    assert f"beside ${spent:.4f} that earlier sessions paid; nothing was sent" in again.stderr
    assert sessions.run(*silent, "--retry-wrong", "--max-usd", str(estimate * 3)).returncode == 0
    assert sessions.result() == faultless | {"effort": "none"}


def test_what_the_server_does_not_count_is_counted_at_the_most_that_it_can_be(
    server: Judge, sessions: Sessions
) -> None:
    batch = ("--effort", "none", "--batch", "--poll-seconds", "0.05")
    server.usage = lambda _: {"input_tokens": "many"}
    done = sessions.run(*batch)
    assert done.returncode == 0, done.stderr
    at_most = re.search(
        r"sessions: at most \$([\d.]+): \$0\.0000 by the server's counts, and up to .* for 15 req", done.stdout
    )
    assert at_most is not None
    assert float(at_most[1]) >= server.usd(PRICES)
    again = sessions.run(*batch)
    assert (again.returncode, server.billed) == (0, PROMPTS)
    assert f"sessions: at most ${at_most[1]}: " in again.stdout


def test_timeouts_do_not_spend_more_than_allowed(server: Judge, sessions: Sessions) -> None:
    server.idempotent, server.every = False, "slow"
    done = sessions.run(*SILENT, "--timeout", "0.2", "--max-usd", "4", "--concurrency", "64")
    assert done.returncode == 75, done.stderr
    assert 0 < server.usd(PRICES) <= printed(done.stdout) <= 4
    assert sessions.run(*SILENT, "--timeout", "0.2", "--max-usd", "4").returncode == 1
    assert server.usd(PRICES) <= 4


def test_one_request_goes_first_and_long_replies_end_at_the_limit(server: Judge, sessions: Sessions) -> None:
    server.idempotent, server.every = False, "long"
    done = sessions.run(*SILENT, "--max-usd", "6", "--concurrency", "64")
    assert server.billed <= 8
    assert {body["max_output_tokens"] for body in server.requests} == {680, 2 * 680}  # cut off: once more, with twice
    assert server.usd(PRICES) <= printed(done.stdout) <= 6


def test_a_server_that_ignores_the_limit_is_noticed_by_its_first_reply(server: Judge, sessions: Sessions) -> None:
    server.ignores_limit, server.every = True, "long"
    done = sessions.run(*SILENT, "--max-usd", "30", "--concurrency", "64")
    assert "this server ignores limits; from now on requests count at the larger size" in done.stderr
    assert server.billed == 1  # of 20 dollars: another one could be as dear
    assert (done.returncode, printed(done.stdout)) == (75, pytest.approx(server.usd(PRICES), abs=1e-3))
    again = sessions.run(*SILENT, "--max-usd", "30", "--concurrency", "64")
    assert again.returncode != 0
    assert server.billed == 1  # the next session knows it from the file


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_wrong_counts_of_tokens_never_print_less_than_the_bill(server: Judge, sessions: Sessions, api: str) -> None:
    wrong = ["more cached than read", "no usage", "negative usage", "usage of zeros", "huge usage", "usage a list"]
    server.faults = dict(enumerate(wrong))
    done = sessions.run(*SILENT, "--api", api)
    assert done.returncode == 0, done.stderr
    assert "for 5 requests without an answer or count" in done.stdout
    assert printed(done.stdout) >= server.usd(PRICES)


def test_an_estimate_is_what_replies_of_the_same_judge_used(server: Judge, sessions: Sessions) -> None:
    done = sessions.run()
    spent = server.usd(PRICES)
    refused = sessions.run("--seed", "7", "--orders", "3", "--max-usd", "0.01")
    about = float(re.findall(r"about \$([\d.]+)", refused.stderr)[0])
    assert done.returncode == 0
    assert 0.8 * spent < about < 1.5 * spent


@pytest.fixture
def budget(tmp_path: Path) -> Iterator[JudgeBudget]:
    """The budget of two prompts for gpt-5-mini: 2 dollars a million tokens of output."""
    prompts = {prompt.key: prompt for prompt in make_prompts(panel(2, 1), JUDGE, repeats=2, seed=0)}
    with closing(VerdictStore(tmp_path / "verdicts.jsonl")) as store:
        yield JudgeBudget(JUDGE, prompts, store, read_price(PRICE_TABLE, JUDGE.model), 1.0)


def ask(budget: JudgeBudget, key: str, id: str, output: int) -> Asked:
    """Store a request that may use so many tokens of output."""
    most = Usage(input=0, output=output)
    asked = Asked(id=id, key=key, judge=JUDGE.label, answers=3, sent_bytes=9, limit=output, most=most)
    budget.note(StoreLine(asked=asked))
    return asked


def answer(budget: JudgeBudget, asked: Asked, output: int | None) -> None:
    """Store a reply with so many tokens of output; None: the server did not say."""
    usage = None if output is None else {"input_tokens": 9, "output_tokens": output}
    budget.note(StoreLine(reply=read_reply(asked, {"usage": usage})))


def test_a_request_counts_at_its_most_until_it_is_answered(budget: JudgeBudget) -> None:
    first, second = budget.prompts
    asked = [ask(budget, first, "a", 150_000), ask(budget, first, "b", 150_000), ask(budget, second, "c", 150_000)]
    assert budget.usd == pytest.approx(0.9)
    assert (budget.allows(0.1), budget.allows(0.11)) == (True, False)
    answer(budget, asked[0], 25_000)
    answer(budget, asked[1], None)
    assert [budget.usd, budget.cost.usd] == pytest.approx([0.65, 0.65], abs=1e-5)
    assert (budget.cost.counted, len(budget.cost.open)) == (pytest.approx(0.05, abs=1e-5), 2)
    budget.note(StoreLine(unbilled=["a", "b", "c"], why="never sent"))  # of the answered ones this says nothing
    assert (budget.usd, len(budget.cost.open)) == (pytest.approx(0.05 + 0.3, abs=1e-5), 1)
    again = JudgeBudget(JUDGE, budget.prompts, budget.store, budget.price, 1.0)  # of the next session
    assert again.usd == pytest.approx(budget.usd)
    unpriced = JudgeBudget(JUDGE, budget.prompts, budget.store, UNKNOWN_PRICE, 1.0)
    assert (unpriced.cost.usd, unpriced.most_usd(asked[0])) == (0, 0)


def test_the_limit_of_a_reply_leaves_room_for_reasoning_and_doubles_where_it_was_cut(budget: JudgeBudget) -> None:
    prompt = next(iter(budget.prompts.values()))
    asked, body = budget.plan(prompt)
    assert body["max_output_tokens"] == asked.limit == asked.most.output == most_output(3, JUDGE) > 6000
    assert asked.most.input == asked.sent_bytes >= len(body["input"])
    budget.note(StoreLine(reply=attrs.evolve(read_reply(asked, {}), cut=True)))
    assert budget.plan(prompt)[0].limit == 2 * asked.limit
    assert most_output(3, attrs.evolve(JUDGE, effort="high")) > 20_000
    assert most_output(3, attrs.evolve(JUDGE, effort="none")) < 1000
    assert most_output(3, attrs.evolve(JUDGE, model="gpt-4.1")) < 1000  # it does not reason
    asked = attrs.evolve(asked, sent_bytes=400)
    silent = attrs.evolve(JUDGE, model="gpt-5.4-mini")  # nor that, by default
    assert expected_usage(asked, silent) == Usage(input=100, output=120)
    assert expected_usage(asked, JUDGE).output == 620


def test_the_limit_comes_down_to_what_many_replies_have_needed(budget: JudgeBudget) -> None:
    prompt = next(iter(budget.prompts.values()))
    limits = []
    for number, used in enumerate([200] * 20 + [400]):
        limits.append(budget.plan(prompt)[0].limit)
        answer(budget, ask(budget, str(number), str(number), 400), used)
    assert limits == [6680] * 20 + [835]
    assert budget.plan(prompt)[0].limit == 1670
