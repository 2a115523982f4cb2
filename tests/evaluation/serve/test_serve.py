"""`evaluate.py serve` with OpenAI's client: answers, errors in its format, disconnected clients, and signals."""

import http.client
import json
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import BadInput
from evaluation.generation.chat import Conversation
from evaluation.generation.generated_text import GeneratedText
from evaluation.serve.engine import CHUNK
from evaluation.shared.load import load
from evaluation.shared.model_location import locate
from model.generate import Sampling
from tests import launch
from tests.conftest import only_line
from tests.evaluation.serve.conftest import CONTEXT, Serve, Served
from tests.launch import ROOT
from tokens.tokenizer.template import Message

HELLO: Any = [{"role": "user", "content": "Hello"}]
KEY = "0123456789abcdef"
GREEDY = {"model": "run", "messages": HELLO, "temperature": 0}


def client(served: Served, key: str = "none") -> Any:
    import openai

    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(served: Served, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any, Any]:
    """Return the status, headers and JSON of a POST. `body`: bytes, or a value to encode as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", path, data, named)
    answer = connection.getresponse()
    return answer.status, answer.headers, json.loads(answer.read())


def stream(served: Served, **body: Any) -> socket.socket:
    """Return a connection that has begun to receive a streamed answer."""
    data = json.dumps({**GREEDY, "stream": True, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    assert b"200 OK" in connection.recv(4096)
    return connection


def test_answers_equal_generated_text(chat_run: Path, served: Served) -> None:
    trained = load(locate(str(chat_run), None), None, torch.device("cpu"))
    assert trained.template is not None
    prompt = trained.template.prompt(trained.tokenizer, [Message("user", "Hello")])
    expected = "".join(GeneratedText(trained, prompt, 40, Sampling(temperature=0), stop=trained.stop_ids))
    completions: Any = client(served).chat.completions
    completion = completions.create(**GREEDY, max_tokens=40, logprobs=True, top_logprobs=3)
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == (expected, "length")
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(prompt), 40)
    scores = completion.choices[0].logprobs.content
    assert b"".join(bytes(chunk.bytes) for chunk in scores) == expected.encode()
    assert all(chunk.logprob == chunk.top_logprobs[0].logprob and len(chunk.top_logprobs) == 3 for chunk in scores)
    usage = {"include_usage": True}
    chunks = [*completions.create(**GREEDY, max_completion_tokens=40, stream=True, stream_options=usage)]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == expected
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 40 and chunks[-1].choices == []
    stopped = completions.create(**GREEDY, stop=[expected[10:14], "never"])
    text = expected[: expected.index(expected[10:14])]
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (text, "stop")


def test_chat_history_is_cached_without_a_seed(served: Served) -> None:
    completions: Any = client(served).chat.completions
    first = completions.create(**GREEDY, max_tokens=9)
    history = [*HELLO, {"role": "assistant", "content": first.choices[0].message.content}, *HELLO]
    for more, least in (({}, 8), ({"seed": 3}, 0)):
        again = completions.create(**{**GREEDY, "messages": history}, max_tokens=9, **more)
        cached = again.usage.prompt_tokens_details.cached_tokens
        assert cached >= least if least else cached == 0


def test_text_completions_report_their_tokens(served: Served) -> None:
    completions = client(served).completions
    completion = completions.create(model="run", prompt="one tw", temperature=0, max_tokens=8, logprobs=2)
    scores = completion.choices[0].logprobs
    assert scores and scores.tokens and completion.choices[0].finish_reason == "length"
    assert "".join(scores.tokens) == completion.choices[0].text
    assert ask(served, {"model": "run", "prompt": [5], "max_tokens": 1}, "/v1/completions")[0] == 200
    chunks = [*completions.create(model="run", prompt=[*b"one tw"], temperature=0, max_tokens=8, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == completion.choices[0].text
    assert [chunk.id for chunk in client(served).models.list()] == ["run"] and client(served).models.retrieve("run")


def test_truncation_leaves_out_the_same_turns_as_chat(chat_run: Path, served: Served) -> None:
    trained = load(locate(str(chat_run), None), None, torch.device("cpu"))
    conversation = Conversation(trained, 20, "Be brief.")
    turns = [Message(("user", "assistant")[number % 2], f"{number} " + "word " * 20) for number in range(6)]
    conversation.turns = turns
    prompt = conversation._prompt(Message("user", "Hello"))
    sent = [*conversation.system, *turns, Message("user", "Hello")]
    body: Any = {**GREEDY, "max_tokens": 20, "messages": [message._asdict() for message in sent]}
    status, _, response = ask(served, body)
    assert (status, response["error"]["code"]) == (400, "context_length_exceeded")
    status, _, response = ask(served, body | {"truncation": "auto"})
    assert (status, response["left_out"], response["usage"]["prompt_tokens"]) == (200, conversation.unseen, len(prompt))
    assert conversation.unseen > 0
    chunk = next(iter(client(served).chat.completions.create(**body, stream=True, extra_body={"truncation": "auto"})))
    assert chunk.left_out == conversation.unseen
    long = "a" * 600
    with pytest.raises(BadInput) as refused:
        conversation._prompt(Message("user", long))
    body["messages"] = [*body["messages"], {"role": "user", "content": long}]
    status, _, response = ask(served, body | {"truncation": "auto"})
    assert (status, response["error"]["message"]) == (400, str(refused.value))
    texts = {"earlier": ["a" * 300, "b" * 100], "prompt": "c" * 200, "truncation": "auto", "max_tokens": 300}
    status, _, response = ask(served, {"model": "run", **texts}, "/v1/completions")
    assert (status, response["left_out"], response["usage"]["prompt_tokens"]) == (200, 2, 200)


def test_several_prompts_have_separate_choices(served: Served) -> None:
    completions: Any = client(served).completions
    body = {"model": "run", "temperature": 0, "max_tokens": 8, "stop": ["thr"]}
    prompts: list[Any] = ["one tw", [*b"two"], "Gr\u00fc\u00df"]
    alone = [completions.create(prompt=prompt, **body) for prompt in prompts]
    together = completions.create(prompt=prompts, n=2, **body)
    assert [choice.index for choice in together.choices] == [*range(6)]
    expected = [
        (completion.choices[0].text, completion.choices[0].finish_reason) for completion in alone for _ in range(2)
    ]
    assert [(choice.text, choice.finish_reason) for choice in together.choices] == expected
    assert together.usage.prompt_tokens == sum(completion.usage.prompt_tokens for completion in alone) == 6 + 3 + 6
    assert together.usage.completion_tokens == 2 * sum(completion.usage.completion_tokens for completion in alone)
    chunks = [*completions.create(prompt=prompts, stream=True, stream_options={"include_usage": True}, **body)]
    texts, ends = [""] * 3, [""] * 3
    for choice in (chunk.choices[0] for chunk in chunks[:-1]):
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason or ""
    assert [*zip(texts, ends, strict=True)] == expected[::2]
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens == together.usage.prompt_tokens


def test_seeded_answers_do_not_depend_on_other_prompts(served: Served) -> None:
    completions: Any = client(served).completions
    body = {"model": "run", "temperature": 1.5, "max_tokens": 30, "seed": 7}
    pair, crowd = (completions.create(prompt=prompts, n=2, **body) for prompts in (["ab"], ["cd", "ab", "ef"]))
    assert [choice.text for choice in pair.choices] == [choice.text for choice in crowd.choices[2:4]]
    assert pair.choices[0].text != pair.choices[1].text


def test_prompt_scores_suit_lm_evaluation_harness(chat_run: Path, served: Served) -> None:
    network = load(locate(str(chat_run), None), None, torch.device("cpu")).network
    end = 256  # the end-of-text id in the tokenizer `bytes`
    prompts = [[end, *b"one two three", *"Gr\u00fc\u00df".encode()], [*b"four " * 60], [end, 97], [97]]
    prompts.append([98] * (CHUNK + 1))
    form = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    status, _, body = ask(served, {"model": "run", "prompt": prompts, **form}, "/v1/completions")
    assert status == 200 and [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4]
    for prompt, choice in zip(prompts, body["choices"], strict=True):
        with torch.inference_mode():
            rows = torch.log_softmax(network(torch.tensor([prompt]))[0], dim=-1)
        scores, text = choice["logprobs"], choice["text"]
        assert text.startswith(
            b"".join(b"<|endoftext|>" if entry == end else bytes([entry]) for entry in prompt).decode()
        )
        # The number of entries is always one more than the number of the prompt's tokens. The harness drops the last
        # entry.
        assert {len(values) for values in scores.values()} == {len(prompt) + 1}
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        expected = [float(row[token]) for row, token in zip(rows, prompt[1:], strict=False)]
        assert scores["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
        pairs = [*zip(scores["token_logprobs"], scores["top_logprobs"], strict=True)][1:-1]
        greedy = [value == max(top.values()) for value, top in pairs]
        assert greedy == [int(row.argmax()) == token for row, token in zip(rows, prompt[1:], strict=False)]
    streamed = [*client(served).completions.create(model="run", prompt=prompts[1], stream=True, **form)]
    assert "".join(entry.choices[0].text for entry in streamed) == body["choices"][1]["text"]
    values = [value for entry in streamed for value in entry.choices[0].logprobs.token_logprobs]
    assert values == body["choices"][1]["logprobs"]["token_logprobs"]


def test_echo_begins_with_the_prompt(served: Served) -> None:
    completions: Any = client(served).completions
    body = {"model": "run", "echo": True, "temperature": 0}
    bare = completions.create(prompt=["Gr\u00fc\u00df", ""], max_tokens=0, **body)
    assert [(entry.text, entry.finish_reason, entry.logprobs) for entry in bare.choices] == [
        ("Gr\u00fc\u00df", "length", None),
        ("", "length", None),
    ]
    assert bare.usage.completion_tokens == 0
    scored = completions.create(prompt="Gr\u00fc\u00df", max_tokens=0, logprobs=0, **body).choices[0].logprobs
    assert scored.text_offset == [0, 1, 2, 2, 3, 3] and scored.tokens == [
        "G",
        "r",
        *[f"\\x{entry:x}" for entry in b"\xc3\xbc\xc3\x9f"],
    ]
    pairs = zip(scored.tokens[1:], scored.token_logprobs[1:], strict=True)
    assert scored.top_logprobs == [None, *({name: value} for name, value in pairs)]
    plain = completions.create(model="run", prompt="one tw", temperature=0, max_tokens=8).choices[0].text
    assert completions.create(prompt="one tw", max_tokens=8, stop=["ne"], **body).choices[0].text == "one tw" + plain
    full = [5] * CONTEXT
    assert completions.create(prompt=full, max_tokens=0, logprobs=5, **body).usage.total_tokens == CONTEXT


@pytest.mark.parametrize(
    ("changed", "param", "problem"),
    [
        (
            {"prompt": ["a", "b" * 600]},
            "prompt",
            rf"prompt\[1\]: the prompt has 600 tokens; .* at most {CONTEXT} tokens",
        ),
        (
            {"prompt": "b" * 600, "echo": True, "logprobs": 1},
            "prompt",
            f"has 600 tokens; prompt and answer .* {CONTEXT}",
        ),
        (
            {"prompt": "b" * 513, "echo": True, "max_tokens": 0},
            "prompt",
            f"has 513 tokens; the context has at most {CONTEXT}",
        ),
        ({"prompt": ["a", 5]}, "prompt", r"prompt\[1\]: got 5, wanted a string, or a list of token ids"),
        ({"prompt": [[5], []]}, "prompt", r"prompt\[1\]: got \[\]"),
        ({"prompt": [[5], [5, 70_000]]}, "prompt", r"prompt\[1\]: got \[5, 70000\], wanted .* at most 260"),
        ({"prompt": [True]}, "prompt", r"prompt\[0\]: got True"),
        ({"prompt": []}, "prompt", r"prompt: got \[\]"),
        ({"prompt": ["a", "\ud800"]}, "prompt", r"prompt\[1\]: got half a surrogate pair"),
        (
            {"prompt": ["a", "<|endoftext|>a"], "echo": True, "logprobs": 1},
            "prompt",
            r"prompt\[1\]: got '<\|endoftext\|>' in a text whose tokens are scored, .* send token ids .* 256",
        ),
        ({"prompt": ["a"] * 73}, "prompt", "73 prompts with n = 1 are 73 answers; this server allows at most 72"),
        ({"prompt": ["a"] * 37, "n": 2}, "prompt", "37 prompts with n = 2 are 74 answers"),
        ({"n": 0}, "n", "n: got 0, wanted an integer of at least 1, at most 128"),
        ({"echo": 1}, "echo", "true or false"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, or echo to be true"),
        ({"best_of": 3}, "best_of", "not supported"),
    ],
)
def test_completion_errors_name_the_prompt(served: Served, changed: dict[str, Any], param: str, problem: str) -> None:
    status, _, body = ask(served, {"model": "run", "prompt": "a", "max_tokens": 1, **changed}, "/v1/completions")
    assert (status, body["error"]["param"]) == (400, param), body
    assert re.search(problem, body["error"]["message"]), body


@pytest.mark.parametrize(
    ("changed", "status", "param", "problem"),
    [
        ({"model": "gpt-4"}, 404, "model", "this server has 'run'"),
        ({"model": None}, 400, "model", "is missing"),
        ({"n": 2}, 400, "n", "not supported"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
        ({"top_k": 5}, 400, "top_k", "unknown key"),
        ({"temperature": -1}, 400, "temperature", "wanted a number from 0 up to 2"),
        ({"temperature": float("nan")}, 400, "temperature", "wanted a number"),
        ({"top_p": 0}, 400, "top_p", "above 0"),
        ({"seed": 1.5}, 400, "seed", "an integer"),
        ({"max_tokens": -5}, 400, "max_tokens", "at least 1"),
        ({"stop": ["a"] * 5}, 400, "stop", "at most 4"),
        ({"stop": ""}, 400, "stop", "strings"),
        ({"stream": "yes"}, 400, "stream", "true or false"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "logprobs to be true"),
        ({"messages": []}, 400, "messages", "a list of messages"),
        ({"messages": [{"role": "cook", "content": ""}]}, 400, "messages", "got 'cook', wanted system, user"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages", "surrogate"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "a string"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, 400, "messages", "part .*None"),
        ({"messages": [{"role": "user", "content": 0}]}, 400, "messages", "got 0, wanted a string"),
        ({"messages": [{"role": "user"}]}, 400, "messages", "got None, wanted a string"),
        ({"messages": [HELLO[0] | {"name": "Ann"}]}, 400, "messages", "got 'name'"),
        ({"messages": [HELLO[0] | {"id": 7}]}, 400, "messages", "got 'id'"),
        ({"messages": [HELLO[0] | {"refusal": False}]}, 400, "messages", "got 'refusal'"),
        ({"n": True}, 400, "n", "got True, wanted 1"),
        ({"presence_penalty": False}, 400, "presence_penalty", "got False, wanted 0"),
        ({"logit_bias": False}, 400, "logit_bias", "got False"),
        ({"user": 5}, 400, "user", "got 5, wanted a string"),
        ({"temperature": "0"}, 400, "temperature", "got '0'"),
        ({"max_tokens": True}, 400, "max_tokens", "got True"),
        ({"stream": "false"}, 400, "stream", "true or false"),
        ({"stream": True, "stream_options": {"usage": True}}, 400, "stream_options", "include_usage"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream to be true"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens", "one of them"),
        ({"messages": HELLO * 10_000}, 400, "messages", f"got 10,000, wanted at most {CONTEXT}"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, 400, None, "600|60[0-9] tokens"),
    ],
)
def test_errors_have_the_form_of_the_api(
    served: Served, changed: dict[str, Any], status: int, param: str | None, problem: str
) -> None:
    got, _, body = ask(served, {**GREEDY, **changed})
    error = body["error"]
    assert (got, error["param"], error["type"]) == (status, param, "invalid_request_error"), body
    assert re.search(problem, error["message"]), error


def test_malformed_requests_are_refused(served: Served) -> None:
    for body in (b"", b"{", b"\xff\x00", b"[" * 200_000, b"[]", b'{"model":"run","model":"run"}'):
        status, _, response = ask(served, body)
        assert (status, response["error"]["type"]) == (400, "invalid_request_error")
    assert ask(served, b" " * (2 << 20))[0] == 413
    assert ask(served, {}, "/v1/chat/complete")[2]["error"]["code"] == "unknown_url"
    assert ask(served, {}, "/v1/../../etc/passwd")[0] == 404
    for head, status in (
        ("GET /v1/chat/completions HTTP/1.1\r\nHost: localhost", b" 405 "),
        ("HEAD / HTTP/1.1\r\nHost: localhost", b" 200 "),
        ("GET / HTTP/1.0\r\nHost: localhost", b" 200 "),
        ("GET / HTTP/1.0", b" 403 "),
        ("\x00\x01\x02", b" 400 "),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nX: " + "y" * 2_000_000, b" 400 "),
    ):
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n")
            assert status in connection.recv(100).partition(b"\r\n")[0], head


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
def test_idle_connections_are_closed(served: Served, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(sent)
        assert connection.recv(100) == b""


def test_other_origins_and_host_names_are_refused(served: Served) -> None:
    for header in ("Host: evil.example", "Origin: http://evil.example", "Origin: null", "Origin: http://["):
        assert ask(served, GREEDY, **dict([header.split(": ")]))[0] == 403
    host = f"127.0.0.1:{served.port}"
    status, headers, _ = ask(served, {**GREEDY, "max_tokens": 1}, Host=host, Origin=f"http://{host}")
    assert status == 200 and "Access-Control-Allow-Origin" not in headers


def test_api_key_protects_every_path(chat_run: Path, served: Served, serve: Serve, tmp_path: Path) -> None:
    import openai

    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "short").write_text(KEY[1:])
    for options, environment in (
        (["--api-key-file", str(tmp_path / "key"), "--host=0.0.0.0"], {}),
        ([], {"LOCKSTEP_API_KEY": KEY}),
    ):
        with serve(chat_run, *options, **environment) as locked:
            for path in ("/v1/models", "/v1/nothing", "/v1/completions"):
                assert ask(locked, {}, path)[2]["error"]["code"] == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                client(locked, KEY[:-1]).models.list()
            assert ask(locked, {}, "/v1/models", Authorization="Bearer é", Host="chat.example")[0] == 401
            assert client(locked, KEY).models.list().data[0].id == "run"
    for options, problem in (
        (["--host=0.0.0.0"], "not a loopback address, so an API key is needed"),
        (["--host=no.such.host.invalid"], "--host no.such.host.invalid"),
        ([f"--port={served.port}"], "Address already in use"),
        (["--api-key-file", str(tmp_path / "none")], "No such file"),
        (["--api-key-file", str(tmp_path / "short")], "at least 16"),
    ):
        port = [] if options[0].startswith("--port") else ["--port=0"]
        done = launch.run(ROOT / "evaluate.py", "serve", str(chat_run), "--device=cpu", *port, *options)
        assert problem in only_line(done)


def test_disconnected_client_frees_its_slot(chat_run: Path, serve: Serve) -> None:
    with serve(chat_run, "--slots=1", "--queue=0") as served:
        leaves = stream(served)
        status, headers, body = ask(served, GREEDY)
        assert (status, headers["Retry-After"], body["error"]["code"]) == (429, "1", "rate_limit_exceeded")
        leaves.close()
        launch.wait_until(lambda: ask(served, {**GREEDY, "max_tokens": 1})[0] == 200, served.process)


def test_seeded_answers_do_not_depend_on_other_clients(served: Served) -> None:
    slow = stream(served, logprobs=True, top_logprobs=20)

    def content_of(seed: int | None) -> str:
        body = {**GREEDY, "temperature": 1.5, "seed": seed, "max_tokens": 60}
        return str(ask(served, body)[2]["choices"][0]["message"]["content"])

    alone = [content_of(seed) for seed in (7, -8)]
    with ThreadPoolExecutor(8) as pool:
        crowd = [*pool.map(content_of, [7, None, -8, None, None, 7, None, -8])]
    assert [crowd[0], crowd[5]] == [alone[0]] * 2 and [crowd[2], crowd[7]] == [alone[1]] * 2
    assert len({*crowd}) >= 5
    slow.close()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_end_answers(chat_run: Path, serve: Serve, number: int, status: int) -> None:
    with serve(chat_run) as served:
        with socket.create_connection(("127.0.0.1", served.port)) as leaves:
            leaves.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        connections = [stream(served) for _ in range(3)]
        served.process.send_signal(number)
        assert served.process.wait(launch.TIMEOUT_SECONDS) == status
        for connection in connections:
            received = b"".join(iter(lambda: connection.recv(1 << 16), b""))  # noqa: B023
            assert b"[DONE]" in received or b'"code":"shutting_down"' in received
        line = "evaluate.py: interrupted; stored results are kept\n" if status else ""
        assert served.process.stderr.read() == line
