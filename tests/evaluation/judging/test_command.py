"""evaluate.py judge: unusable options give one-line errors, and scores without a judge need no options."""

import re

import pytest

from common.errors import BadInput
from common.redaction import HIDDEN
from evaluation.judging.judge import find_key
from tests.conftest import ROOT, only_line
from tests.evaluation.judging.sessions import Sessions, run
from tests.judge_server import Judge
from tests.launch import RANK_OF_TWO

KEY = "sk-proj-/secret+key=0123"
OPENAI = ("--base-url", "https://api.openai.com/v1")
REFUSED = {  # for each list of options: the key in the environment, and the expected error
    # This error is raised before the slow computation of the scores.
    OPENAI: (
        "",
        "OPENAI_API_KEY: not set; set it to your OpenAI API key",
    ),
    ("--base-url", "localhost:1"): ("", "--base-url: got 'localhost:1', wanted http:// or https://"),
    ("--base-url", "https://me:secret@host/v1"): (
        "",
        "--base-url: got 'https://host/v1', wanted http:// or https://, without",
    ),
    ("--base-url", "https://host/v1?api-key=hunter12"): (
        "",
        "--base-url: got 'https://host/v1?api-key=[secret]', wanted",
    ),
    ("--base-url", "http://127.0.0.1:99999/v1"): ("", "--base-url: got 'http://127.0.0.1:99999/v1', wanted http://"),
    ("--base-url", "http://[::1/v1"): ("", "--base-url: got 'http://[::1/v1', wanted http:// or https://"),
    ("--base-url", "http://192.168.1.5/v1"): (KEY, "OPENAI_API_KEY would cross the network unencrypted; use https://"),
    ("--base-url", "http://127.0.0.1:1/v1"): ("", "http://127.0.0.1:1/v1: cannot be reached: "),
    ("--model", "script"): (
        "",
        "no price for 'script'; add it to the file, or pass --prices; did you mean 'scripted'?",
    ),
    ("--prices", "README.md"): ("", "README.md: not JSON"),
}


@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_unusable_judge_options_are_refused(
    sessions: Sessions, options: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, line = REFUSED[options]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    done = sessions.run(*options)
    assert line in only_line(done)
    output = (done.stdout + done.stderr).replace(HIDDEN, "")
    assert "secret" not in output and "hunter12" not in output


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("401", "401: scripted 401"),
        ("404", "404: scripted 404"),
        ("echo", "401: wrong key: Bearer [secret]"),
        ("redirect", "307: redirects are not followed; pass the final address with --base-url"),
    ],
)
def test_error_common_to_all_requests_ends_the_session(
    server: Judge, sessions: Sessions, monkeypatch: pytest.MonkeyPatch, fault: str, line: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.every = fault
    done = sessions.run()
    assert f"evaluate.py: {server.url}: {line}" in only_line(done) and len(server.requests) == 1
    contents = [path.read_text(errors="replace") for path in sessions.folder.rglob("*") if path.is_file()]
    assert not any("secret+key" in text for text in [done.stdout, done.stderr, *contents])


def test_scores_need_no_judge(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("judge", *map(str, sessions.files))
    assert done.returncode == 0, done.stderr
    assert "no judge model was given; to have the answers judged, pass --model" in done.stdout
    assert re.search(r"good +1 +0\.0% +[\d.]+ ± [\d.]+ +2\.200 ± 0\.071", done.stdout)
    for name, value in RANK_OF_TWO.items():
        monkeypatch.setenv(name, value)
    ranks = sessions.run()
    assert (ranks.returncode, "wanted one; run python evaluate.py judge" in ranks.stderr) == (1, True)


@pytest.mark.parametrize(
    "key",
    [
        "sk-proj-secr\u00e9t0123",
        "sk-proj-secret\n0123",
        "sk-proj secret0123",
        "'sk-proj-secret0123'",
        "\u201csk-proj-secret\u201d",
    ],
)
def test_unsendable_key_costs_nothing(
    server: Judge, sessions: Sessions, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    line = only_line(sessions.run())
    assert "OPENAI_API_KEY: contains the character" in line and "nothing was sent" in line and "proj" not in line
    assert not server.requests and not sessions.unanswered()


def test_unsendable_request_costs_nothing(server: Judge, sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-\u00e9")  # a header of OpenAI's client
    assert f"{server.url}: the request cannot be sent: " in only_line(sessions.run())
    assert not server.requests and not sessions.unanswered()


def test_key_is_never_sent_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\r\n")
    for url in ("http://localhost:1/v1", "http://127.0.0.2/v1", "http://[::1]/v1", "https://far.example/v1"):
        assert find_key(url) == KEY
    with pytest.raises(BadInput, match="OPENAI_API_KEY would cross the network unencrypted; use https://"):
        find_key("http://192.168.1.5:8000/v1")


def test_placeholder_key_may_be_sent_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    assert find_key("http://192.168.1.5:8000/v1") == "EMPTY"  # the key in vLLM's documentation


def test_echoed_key_is_never_stored(server: Judge, sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.every = "echo in any spelling"
    done = sessions.run("--concurrency", "1")
    assert done.returncode == 1 and "[secret]" in done.stderr
    contents = [path.read_text(errors="replace") for path in sessions.folder.rglob("*") if path.is_file()]
    for text in [done.stdout, done.stderr, *contents]:
        assert "secret+key" not in text and "secret\\" not in text and "u002" not in text.lower()
    assert {reply.id for reply in sessions.replies()} == {"[secret]"}
