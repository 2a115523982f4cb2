"""Whatever the server does: no verdict is lost, none is paid for twice, none counts as a zero. Over real sockets."""

import io
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import attrs
import pytest

import evaluate
from common.errors import BadInput
from evaluation.judging.candidates import find_files, read_panel
from evaluation.judging.client import verdict_in
from evaluation.judging.prices import money
from evaluation.judging.verdicts import Reply, Usage, VerdictStore
from evaluation.shared.records import Answer, Answers, Record, write_answers
from evaluation.shared.results import append_result
from tests import launch
from tests.conftest import ROOT
from tests.judge_server import Judge, serve

QUESTIONS, ORDERS = 5, 3
PROMPTS = QUESTIONS * ORDERS
ANSWERED_AGAIN = ["cut off", "wrong labels", "missing label", "duplicate label", "too high", "no number", "prose"]
REPEATED = ["429", "500", "503", "dropped", "billed and dropped", "slow", "half a body"]
LEFT_OUT = ("time", "base_url", "usd", "usd_uncounted")  # of a result: what may differ between sessions that agree
PRICES = {
    "date": "2026-01-01",
    "batch_discount": 0.5,
    "usd_per_million_tokens": {"scripted": {"input": 100, "cached_input": 10, "output": 1000}},
}


def quality(asked: dict[str, Any]) -> dict[str, int]:
    """Score each answer by the number that it carries."""
    return {label: int(re.findall(r"\d+", text)[-1]) for label, text in asked["answers"].items()}


def write(folder: Path, model: str, level: int, *, seed: int = 0, questions: range = range(QUESTIONS)) -> Path:
    """Write answers whose quality is about `level`; the references' is 95."""
    settings = {"seed": seed, "epochs": 2, "losses": [2.0, 1.0 + seed], "best_epoch": seed}
    answers = [
        Answer(
            record=Record(instruction=f"Instruction {n}", input="", output=f"reference {n}: 95"),
            text=f"{model} says to {n}: {level + (7 * n + 3 * seed) % 5}",
            reference_loss=2.0 + n / 10,
        )
        for n in questions
    ]
    file = folder / model / "answers" / f"seed-{seed}.json"
    write_answers(file, Answers(model=model, seed=seed, home=None, settings=settings, answers=answers))
    return file


@pytest.fixture
def server() -> Iterator[Judge]:
    with serve(quality) as judge:
        yield judge


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "prices.json").write_text(json.dumps(PRICES))
    return [write(tmp_path, "good", 60), write(tmp_path, "poor", 40)]


def command(server: Judge, files: list[Path], *options: str) -> list[str]:
    folder = files[0].parents[2]
    fixed = ["--model", "scripted", "--base-url", server.url, "--verdicts", str(folder / "verdicts.jsonl")]
    return ["judge", *map(str, files), *fixed, "--prices", str(folder / "prices.json"), *options]


def judge(server: Judge, files: list[Path], *options: str) -> Any:
    """Run evaluate.py to its end, in this process."""
    output, errors = io.StringIO(), io.StringIO()
    arguments = ["evaluate.py", *command(server, files, *options)]
    with patch("sys.argv", arguments), redirect_stdout(output), redirect_stderr(errors):
        status = evaluate.main()
    return SimpleNamespace(returncode=status, stdout=output.getvalue(), stderr=errors.getvalue())


def replies(files: list[Path]) -> list[Reply]:
    store = VerdictStore(files[0].parents[2] / "verdicts.jsonl")
    store.close()
    return [reply for same in store.replies.values() for reply in same]


def result(file: Path) -> dict[str, Any]:
    """Return the newest judgement of a model, less what may differ between sessions that agree."""
    line = (file.parent.parent / "evaluations.jsonl").read_text().splitlines()[-1]
    return {key: value for key, value in json.loads(line).items() if key not in LEFT_OUT}


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a session without faults finds."""
    folder = tmp_path_factory.mktemp("faultless")
    (folder / "prices.json").write_text(json.dumps(PRICES))
    files = [write(folder, "good", 60), write(folder, "poor", 40)]
    with serve(quality) as server:
        done = judge(server, files)
    assert done.returncode == 0, done.stderr
    return result(files[0])


def test_scores_are_those_that_the_judge_gave(faultless: dict[str, Any]) -> None:
    good, poor = faultless["candidates"]
    assert faultless["candidate"] == "good"  # which of them the line is of
    assert (good["model"], good["score"]) == ("good", 62)  # 60 to 64, each once
    assert (poor["model"], poor["score"]) == ("poor", 42)
    assert faultless["anchor"] == 95
    (difference,) = faultless["differences"]
    assert (difference["a"], difference["b"], difference["value"]) == ("good", "poor", 20)
    assert difference["low"] == difference["high"] == 20  # the same for every question
    assert faultless["questions"]["count"] == QUESTIONS
    assert (faultless["left_out"], faultless["refused"], faultless["orders"]) == (0, 0, ORDERS)


@pytest.mark.parametrize("fault", REPEATED + ANSWERED_AGAIN)
def test_no_fault_loses_or_doubles_a_verdict(
    server: Judge, files: list[Path], faultless: dict[str, Any], fault: str
) -> None:
    server.faults = {1: fault, 4: fault, 9: fault}
    quick = ("--timeout", "0.5") if fault == "slow" else ()
    done = judge(server, files, "--concurrency", "15", *quick)
    assert done.returncode == 0, done.stderr
    assert result(files[0]) == faultless
    check_paid_once(server, files, wrong=3 if fault in ANSWERED_AGAIN else 0)
    assert all(body["text"]["format"]["strict"] and body["store"] is False for body in server.requests)


def test_chat_completions_say_the_same_whatever_happens(
    server: Judge, files: list[Path], faultless: dict[str, Any]
) -> None:
    server.faults = dict(enumerate([*REPEATED, *ANSWERED_AGAIN]))
    done = judge(server, files, "--api", "chat", "--timeout", "0.5", "--concurrency", "15", "--effort", "low")
    assert done.returncode == 0, done.stderr
    assert result(files[0]) == faultless | {"effort": "low"}
    assert set(server.paths) == {"POST /v1/chat/completions"}
    assert {body["reasoning_effort"] for body in server.requests} == {"low"}
    assert all(body["response_format"]["json_schema"]["strict"] for body in server.requests)
    check_paid_once(server, files, wrong=len(ANSWERED_AGAIN))


def check_paid_once(server: Judge, files: list[Path], *, wrong: int = 0) -> None:
    """Every prompt has one right verdict, and all that was billed is kept."""
    right = Counter(reply.key for reply in replies(files) if verdict_in([reply], 3) is not None)
    assert sorted(right.values()) == [1] * PROMPTS
    assert len(replies(files)) == server.billed == PROMPTS + wrong


def test_a_server_that_names_a_time_is_left_alone_until_then(server: Judge, files: list[Path]) -> None:
    server.faults, server.retry_after = {0: "429"}, "2"  # the client's own first wait is half a second at most
    assert judge(server, files[:1], "--concurrency", "1").returncode == 0
    assert server.requests[0] == server.requests[1]
    assert server.times[1] - server.times[0] >= 2


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_refusals_are_left_out_for_all_alike_and_not_asked_again(server: Judge, files: list[Path], api: str) -> None:
    server.faults = {2: "refusal", 7: "refusal"}
    done = judge(server, files, "--api", api, "--allow-left-out", "20")
    assert done.returncode == 0, done.stderr
    assert "verdicts: 13 of 15, refused: 2" in done.stdout
    found = result(files[0])
    assert (found["left_out"], found["refused"]) == (2, 2)
    assert [(row["model"], row["score"]) for row in found["candidates"]] == [("good", 62), ("poor", 42)]  # no zeros
    too_many = judge(server, files, "--api", api)
    assert too_many.returncode == 1
    assert "2 of 15 prompts (13%) have no verdict, wanted at most 10 %: the result is not kept" in too_many.stderr
    assert server.billed == PROMPTS
    server.every = "refusal"
    alone = judge(server, files[:1], "--api", api)
    assert (alone.returncode, alone.stderr) == (
        1,
        "evaluate.py: scripted gave no verdict: refused: I cannot grade this.; ask another --model\n",
    )


def test_a_judge_that_gives_no_verdicts_is_paid_for_eight_and_not_again(
    server: Judge, files: list[Path], faultless: dict[str, Any]
) -> None:
    server.every = "missing label"
    done = judge(server, files)
    assert done.returncode == 1
    assert done.stderr == (
        "evaluate.py: scripted: 8 replies in a row are no verdicts, the last one: labels B, C, wanted A, B, C once "
        f"each; it says '{replies(files)[-1].text[:200]}'; they are kept, and not paid for again: pass another --model"
        ", or --retry-wrong to ask once more, by another --api perhaps\n"
    )
    assert "cost, with what earlier sessions paid: $" in done.stdout
    assert server.billed == len(replies(files)) == 8
    again = judge(server, files)
    assert (again.stderr, server.billed) == (done.stderr, 8)
    server.every, server.retry_after = "500", "0.001"
    done = judge(server, files, "--retry-wrong")
    assert done.returncode == 1
    assert "15 verdicts are missing: 500: scripted 500; nothing is lost" in done.stderr
    assert not (files[0].parent.parent / "evaluations.jsonl").exists()
    server.every = None
    assert judge(server, files, "--retry-wrong").returncode == 0
    assert result(files[0]) == faultless
    assert server.billed == 8 + PROMPTS


def test_a_prompt_with_two_wrong_verdicts_is_left_out_and_not_paid_for_again(
    server: Judge, files: list[Path], faultless: dict[str, Any]
) -> None:
    server.faults, server.wrong_again = {2: "prose"}, True
    done = judge(server, files)
    assert done.returncode == 0, done.stderr
    assert "wrong verdicts only: 1 prompts, which are not paid for again; --retry-wrong asks them" in done.stdout
    assert result(files[0])["left_out"] == 1
    assert (judge(server, files).returncode, server.billed) == (0, PROMPTS + 1)
    server.wrong_again = False
    assert judge(server, files, "--retry-wrong").returncode == 0
    assert (result(files[0]), server.billed) == (faultless, PROMPTS + 2)


def test_a_killed_session_goes_on_and_a_finished_one_costs_nothing(
    server: Judge, files: list[Path], faultless: dict[str, Any]
) -> None:
    server.faults, server.slow_seconds = {5: "slow", 6: "slow"}, 600
    process = launch.start(ROOT / "evaluate.py", *command(server, files, "--concurrency", "2"))
    wait_until(lambda: server.billed == 7)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = len(replies(files))
    assert kept == 5
    store = files[0].parents[2] / "verdicts.jsonl"
    content = store.read_bytes()
    last_reply = content.index(b"\n", content.rindex(b'{"reply"'))
    store.write_bytes(content[: last_reply - 20])  # the last reply is torn as well
    asked = len(server.requests)
    done = judge(server, files)
    assert done.returncode == 0, done.stderr
    assert f"{PROMPTS - kept + 1} requests, {kept - 1} already answered" in done.stdout
    assert len(server.requests) - asked == PROMPTS - kept + 1
    assert server.billed == PROMPTS  # what was paid for and lost is repeated, not billed again
    assert result(files[0]) == faultless
    again = judge(server, files[::-1])
    assert f"0 requests, {PROMPTS} already answered" in again.stdout
    assert len(server.requests) - asked == PROMPTS - kept + 1
    assert result(files[1])["differences"] == faultless["differences"]


def test_ctrl_c_keeps_what_is_in_flight(server: Judge, files: list[Path]) -> None:
    server.faults, server.slow_seconds = {3: "slow", 4: "slow"}, 600
    process = launch.start(ROOT / "evaluate.py", *command(server, files, "--concurrency", "2"))
    wait_until(lambda: server.billed == 5)
    locked = judge(server, files)
    assert locked.returncode == 1
    assert "verdicts.jsonl: another judge writes it; wait for it" in locked.stderr
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "stopping; waiting for what is in flight, Ctrl-C again does not\n"
    server.released.set()
    output, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")
    assert "interrupted: 10 verdicts are missing" in output
    assert len(replies(files)) == server.billed == 5


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_batch_costs_half_and_is_never_handed_over_twice(
    server: Judge, files: list[Path], faultless: dict[str, Any]
) -> None:
    batch = ("--batch", "--poll-seconds", "0.05")
    server.polls_before_end = 10**6
    process = launch.start(ROOT / "evaluate.py", *command(server, files, *batch))
    wait_until(lambda: any("batch_0" in path for path in server.paths))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    store = files[0].parents[2] / "verdicts.jsonl"
    *lines, _ = store.read_text().splitlines()
    store.write_text("".join(line + "\n" for line in lines))  # as if killed before the batch's name was noted
    server.polls_before_end = 0
    server.faults = {0: "duplicate line", 3: "cut off", 5: "500"}
    done = judge(server, files)  # without --batch: it is waiting, and paid for
    assert "0 requests, 15 in a batch, 0 already answered, about $0.0000 at" in done.stdout
    assert done.returncode == 0, done.stderr
    assert "batch batch_0: completed" in done.stderr
    assert result(files[0]) == faultless
    assert list(server.batches) == ["batch_0"]
    assert Counter(server.paths)["POST /v1/responses"] == 2  # of 3 and 5, the dearer way
    check_paid_once(server, files, wrong=1)
    paid = 0.0
    for reply in replies(files):
        assert reply.usage is not None
        new = reply.usage.input - reply.usage.cached_input
        usd = new * 100 + reply.usage.cached_input * 10 + reply.usage.output * 1000
        paid += usd / 2 if reply.batch else usd
    assert paid / 1e6 == pytest.approx(server.usd(PRICES))
    assert f"earlier sessions paid: {money(paid / 1e6)}\n" in done.stdout


def test_a_lost_reply_on_the_way_of_a_batch_is_not_paid_for_twice(
    server: Judge, files: list[Path], faultless: dict[str, Any]
) -> None:
    faults = {"POST /v1/files": "lost", "POST /v1/batches": "lost", "GET /v1/batches/": "503", "GET /v1/files": "lost"}
    server.path_faults = dict(faults)
    done = judge(server, files, "--batch", "--poll-seconds", "0.05")
    assert done.returncode == 0, done.stderr
    assert (server.path_faults, list(server.batches)) == ({}, ["batch_0"])
    assert result(files[0]) == faultless
    check_paid_once(server, files)
    server.path_faults = {"POST /v1/batches": "404"}
    done = judge(server, files, "--seed", "1", "--batch")
    assert done.stderr == f"evaluate.py: {server.url}: this server takes no batches; leave out --batch\n"


def test_a_batch_that_expires_is_handed_over_again_for_the_rest(
    server: Judge, files: list[Path], faultless: dict[str, Any]
) -> None:
    server.batch_end = "expired"
    server.faults = {0: "prose", **{number: "500" for number in range(4, PROMPTS)}}
    first = judge(server, files, "--batch", "--poll-seconds", "0.05", "--api", "chat")
    assert first.returncode == 1
    assert "11 verdicts are missing: scripted; nothing is lost" in first.stderr
    server.batch_end, server.faults = "completed", {}
    done = judge(server, files, "--batch", "--poll-seconds", "0.05", "--api", "chat")
    assert done.returncode == 0, done.stderr
    assert "11 requests, 4 already answered" in done.stdout
    assert result(files[0]) == faultless
    assert list(server.batches) == ["batch_0", "batch_1", "batch_2"]  # the second one of what was wrong
    check_paid_once(server, files, wrong=1)


def test_no_more_is_spent_than_allowed(server: Judge, files: list[Path], faultless: dict[str, Any]) -> None:
    silent = ("--effort", "none", "--concurrency", "1")  # a little may be said, nothing thought
    refused = judge(server, files, *silent, "--max-usd", "0.5")
    assert refused.returncode == 1
    assert "--max-usd: got 0.5, and 15 requests may cost about $" in refused.stderr
    assert server.requests == []
    estimate = float(re.findall(r"about \$([\d.]+)", refused.stderr)[0])
    server.faults, server.wrong_again = dict.fromkeys((0, 2, 4, 6, 8, 10), "wrong labels"), True  # dearer than planned
    done = judge(server, files, *silent, "--max-usd", str(estimate * 1.05))
    spent = float(re.findall(r"paid: \$([\d.]+)", done.stdout)[0])
    assert (done.returncode, done.stderr) == (75, "")
    assert estimate * 0.6 < spent <= estimate * 1.05
    assert spent == pytest.approx(server.usd(PRICES), abs=1e-4)
    assert re.search(r"verdicts are missing, and the next one may cost up to \$0\.\d+; nothing is lost", done.stdout)
    server.wrong_again, billed = False, server.billed
    again = judge(server, files, *silent, "--max-usd", str(spent + 0.1))
    assert (again.returncode, server.billed) == (1, billed)  # "in all" counts what was paid before
    assert f"beside ${spent:.4f} that earlier sessions paid; nothing was sent" in again.stderr
    assert judge(server, files, *silent, "--retry-wrong", "--max-usd", str(estimate * 3)).returncode == 0
    assert result(files[0]) == faultless | {"effort": "none"}


def test_what_the_server_does_not_count_is_counted_at_the_most_that_it_can_be(server: Judge, files: list[Path]) -> None:
    batch = ("--effort", "none", "--batch", "--poll-seconds", "0.05")
    server.usage = lambda _: {"input_tokens": "many"}
    done = judge(server, files, *batch)
    assert done.returncode == 0, done.stderr
    at_most = re.search(
        r"paid: at most \$([\d.]+): \$0\.0000 by the server's counts, and up to .* for 15 req", done.stdout
    )
    assert at_most is not None
    assert float(at_most[1]) >= server.usd(PRICES)
    again = judge(server, files, *batch)
    assert (again.returncode, server.billed) == (0, PROMPTS)
    assert f"paid: at most ${at_most[1]}: " in again.stdout


def test_with_a_limit_a_batch_holds_what_it_has_room_for(server: Judge, files: list[Path]) -> None:
    done = judge(server, files, "--effort", "none", "--batch", "--poll-seconds", "0.05", "--max-usd", "1.9")
    assert done.returncode == 0, done.stderr
    assert len(server.batches) > 1
    assert server.usd(PRICES) <= 1.9


def test_a_prompt_that_the_server_does_not_take_holds_up_no_other(
    server: Judge, files: list[Path], faultless: dict[str, Any]
) -> None:
    server.faults = {0: "400", 4: "400", PROMPTS + 3: "400"}
    most = ("--allow-left-out", "20")
    done = judge(server, files, "--concurrency", "1", *most)
    assert done.returncode == 0, done.stderr
    assert "not taken by the server: 2, as of 'Instruction 0': 400: scripted 400" in done.stdout
    assert (result(files[0])["left_out"], result(files[0])["refused"]) == (2, 0)
    server.every = "400"
    assert judge(server, files, *most).returncode == 0  # these two again; others were answered
    server.every = None
    assert judge(server, files).returncode == 0  # they are asked again, as the server may take it now
    assert result(files[0]) == faultless
    done = judge(server, files, "--effort", "low", "--batch", "--poll-seconds", "0.05")
    assert (done.returncode, result(files[0])["left_out"]) == (0, 1), done.stderr
    asked, server.every = len(server.requests), "400"
    done = judge(server, files, "--effort", "high", "--concurrency", "1")
    assert (done.returncode, done.stderr) == (1, f"evaluate.py: {server.url}: 400: scripted 400\n")
    assert len(server.requests) - asked == 8


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
    assert store.replies == {"k": [reply]}
    assert capsys.readouterr().out.startswith(f"NOTE: {file}: 1 lines passed over")


def test_a_judge_that_likes_the_first_answer_moves_no_difference(server: Judge, files: list[Path]) -> None:
    def biased(asked: dict[str, Any]) -> dict[str, int]:
        return {label: score + (5 if label == "A" else 0) for label, score in quality(asked).items()}

    server.scorer = biased
    done = judge(server, files, "--orders", "2")
    assert done.returncode == 0, done.stderr
    found = result(files[0])
    assert abs(found["differences"][0]["value"] - 20) < 1
    bias = [float(value) for value in re.findall(r"([+-][\d.]+) ±", done.stdout)]
    assert bias == pytest.approx([10 / 3, -5 / 3, -5 / 3], abs=0.4)
    assert "between orders: standard deviation 0.0" not in done.stdout
    alone = judge(server, files[:1])
    assert alone.returncode == 0, alone.stderr
    assert "\ndifference" not in alone.stdout
    assert [row["model"] for row in result(files[0])["candidates"]] == ["good"]


def test_seeds_of_a_model_are_judged_side_by_side(server: Judge, files: list[Path], tmp_path: Path) -> None:
    more = [
        write(tmp_path, "good", 64, seed=1),
        write(tmp_path, "poor", 40, seed=1),
        write(tmp_path, "poor", 0, seed=2),
    ]
    done = judge(server, [*files, *more], "--orders", "1")
    assert done.returncode == 0, done.stderr
    assert "judged: 2 of each model's seeds" in done.stdout
    assert len(server.requests) == 2 * QUESTIONS
    good, poor = result(files[0])["candidates"]
    assert (good["score"], poor["score"]) == (64, 42)  # of seed 0 and 1
    assert result(files[0])["seeds"] == 2
    assert all(len(json.loads(body["input"])["answers"]) == 3 for body in server.requests)


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    server: Judge, files: list[Path], faultless: dict[str, Any]
) -> None:
    full = launch.run(ROOT / "evaluate.py", *command(server, files), file_bytes=4000)
    assert (full.returncode, full.stderr.count("\n")) == (1, 1), full.stderr
    assert "verdicts.jsonl: cannot be written" in full.stderr
    assert 0 < len(server.prompts) < PROMPTS
    assert judge(server, files).returncode == 0
    assert result(files[0]) == faultless
    check_paid_once(server, files)


def test_answers_that_cannot_be_judged_together_are_one_line(files: list[Path], tmp_path: Path) -> None:
    def refused(*names: Path, common: bool = False) -> str:
        with pytest.raises(BadInput) as found:
            read_panel(find_files(list(map(str, names))), common=common)
        assert "\n" not in str(found.value)
        return str(found.value)

    good, poor = files
    other = write(tmp_path, "other", 50, questions=range(3, 9))
    far = write(tmp_path, "far", 50, questions=range(20, 25))
    assert f"{other}: other questions than {good}: 5 and 6, 2 shared; --common judges" in refused(good, other)
    assert "no overlap" in refused(good, far, common=True)
    assert len(read_panel([good, other], common=True).questions) == 2
    assert "two files of 'good' with the same seed" in refused(good, copy(good, "again.json"))
    assert "absent.json: no such file" in refused(tmp_path / "absent.json")
    assert "no answers; write them with evaluate.py instruct" in refused(tmp_path)
    assert "answer 2: output is missing" in refused(copy(good, "cut.json", drop="output"), poor)
    longer = write(tmp_path, "good", 60, seed=1)
    longer.write_text(longer.read_text().replace('"epochs": 2', '"epochs": 3'))
    differ = f"{longer}: other settings than {good}: epochs 3 and 2; fine-tune all seeds alike, or pass files of one"
    assert differ in refused(good, longer)
    twin = write(tmp_path / "elsewhere", "good", 50)
    titles = [candidate.title for candidate in read_panel([good, twin], common=False).candidates]
    assert titles == [f"good ({tmp_path / 'elsewhere' / 'good'})", f"good ({tmp_path / 'good'})"]


def test_of_a_run_only_one_checkpoint_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "checkpoints" / "latest").symlink_to("step-1")
    (run / "answers").mkdir()
    first, second = [
        write(tmp_path, f"run step-{step}", 50).rename(run / "answers" / f"{step}.json") for step in (1, 2)
    ]
    assert find_files([str(run / "checkpoints" / "latest")]) == [first]
    with pytest.raises(BadInput, match="answers of run step-1, run step-2, of which none is known as the newest; pass"):
        find_files([str(run)])
    for step in (1, 2):
        append_result(run, f"run step-{step}", "instruct", {})
    assert capsys.readouterr().out == ""
    assert find_files([str(run)]) == [second]
    assert capsys.readouterr().out == f"{run}: the answers of run step-2, not those of run step-1\n"
    (run / "checkpoints" / "step-3").mkdir()
    with pytest.raises(BadInput, match="no answers of step-3; write them"):
        find_files([str(run / "checkpoints" / "step-3")])


def test_what_no_judge_can_be_asked_for_is_one_line(server: Judge, files: list[Path], tmp_path: Path) -> None:
    def refused(*options: str) -> str:
        arguments = command(server, files, *options)
        done = launch.run(ROOT / "evaluate.py", *arguments, environment={"OPENAI_API_KEY": ""})
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        return done.stdout + done.stderr

    spoiled = tmp_path / "spoiled.json"
    spoiled.write_text("{")
    unset = refused("--base-url", "https://api.openai.com/v1")
    assert unset.startswith("evaluate.py: OPENAI_API_KEY: not set")  # before the scores that take a while
    assert "--base-url: got 'localhost:1'" in refused("--base-url", "localhost:1")
    assert "http://127.0.0.1:1/v1: no server: [Errno 111]" in refused("--base-url", "http://127.0.0.1:1/v1")
    ranks = launch.run(ROOT / "evaluate.py", *command(server, files), environment={"WORLD_SIZE": "2"})
    assert (ranks.returncode, "wanted one: python evaluate.py judge" in ranks.stderr) == (1, True)
    assert "no price of 'script'; add it to the file, or pass --prices; did you mean 'scripted'?" in refused(
        "--model", "script"
    )
    assert "spoiled.json: not JSON" in refused("--prices", str(spoiled))
    server.every = "401"
    assert f"{server.url}: 401: scripted 401" in refused()
    assert len(server.requests) <= 8
    server.every = "404"
    assert "404: scripted 404; has it the Responses API? --api chat" in refused()


def copy(file: Path, name: str, drop: str | None = None) -> Path:
    """Write the same answers once more; `drop`: a field that the second one lacks."""
    value = json.loads(file.read_text())
    value["answers"][1].pop(drop, None)
    (file.parent / name).write_text(json.dumps(value))
    return file.parent / name


def test_without_a_judge_there_are_scores_all_the_same(files: list[Path]) -> None:
    done = launch.run(ROOT / "evaluate.py", "judge", *map(str, files))
    assert done.returncode == 0, done.stderr
    assert "no judge was asked: --model names one" in done.stdout
    assert re.search(r"good +1 +0\.0% +[\d.]+ ± [\d.]+ +2\.200 ± 0\.071", done.stdout)
