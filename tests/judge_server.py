"""An OpenAI-compatible server on loopback whose model is a function, and whose faults are scripted.

The server keeps a bill with an entry for the id of each request. If a request repeats an Idempotency-Key, the server
returns the reply that it has already billed, unless it is configured to ignore that header.
"""

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from tests.loopback import QuietHandler, serving

Scorer = Callable[[dict[str, Any]], dict[str, int]]  # returns a score for each label in a request
API_FAULTS = ("400", "401", "402", "404", "429", "500", "503")  # statuses with the API's error object; not billed
GATEWAY_FAULTS = ("408", "425", "499", "502", "504")  # statuses that a gateway sends with an HTML page; billed
WRONG_USAGES: dict[str, Any] = {  # token counts that no correct reply reports
    "no usage": None,
    "usage of text": {"prompt_tokens": "many"},
    "negative usage": {"prompt_tokens": -5, "completion_tokens": -7},
    "usage of zeros": {"prompt_tokens": 0, "completion_tokens": 0},
    "huge usage": {"prompt_tokens": 10**30, "completion_tokens": 1},
    "usage a list": [1, 2],
}
# Faults that happen at random, and their number per 1000 requests. All other requests get a correct reply.
MIXTURE = {
    **dict.fromkeys(("429", "500", "503", "dropped"), 20),
    **dict.fromkeys(("408", "425", "499", "slow"), 10),
    **dict.fromkeys(("502", "504", "billed and dropped", "half a body", "less than a body"), 15),
    **dict.fromkeys(("cut off", "prose", "wrong labels", "too high", "error in 200", "odd choices", "long"), 12),
    **dict.fromkeys(("fenced", "numbers in strings", "halves", "repeated key"), 25),
    **dict.fromkeys((*WRONG_USAGES, "more cached than read"), 10),
}
COMMENT = "follows the instruction closely, but one of the facts that it names is not right"


@attrs.frozen(kw_only=True)
class Billed:
    """The billed tokens of a request."""

    input: int
    cached: int
    output: int

    def usd(self, prices: dict[str, float]) -> float:
        """Return the cost in dollars."""
        usd = (self.input - self.cached) * prices["input"] + self.cached * prices["cached_input"]
        return (usd + self.output * prices["output"]) / 1e6


class Judge:
    """The configuration of the server, the requests so far, and the bill."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer
        self.url = ""
        self.faults: dict[int, str] = {}  # fault of a prompt's first request; the key is the prompt's number, from 0
        self.every: str | None = None  # fault of all requests
        self.chance: random.Random | None = None  # if set, chooses a fault of `mixture` for each request
        self.mixture = MIXTURE
        self.idempotent = True
        self.wrong_again = False  # whether repeated requests for a prompt get the same fault again
        self.said: dict[str, str | None] = {}  # the fault of each prompt, by the prompt's key, in the order of arrival
        self.snapshot = "scripted"  # the name of the model in replies
        self.bill: dict[str, Billed] = {}  # by X-Client-Request-Id
        self.slow_seconds = 1.0
        self.retry_after = "0.05"  # in seconds; sent with each fault that is an HTTP status
        self.released = threading.Event()  # once it is set, no reply is slow
        self.requests: list[dict[str, Any]] = []  # bodies of the requests
        self.replies: dict[str, dict[str, Any]] = {}  # by Idempotency-Key
        self.lock = threading.Lock()

    @property
    def billed(self) -> int:
        return len(self.bill)

    def fault_of(self, key: str, body: dict[str, Any]) -> str | None:
        """Record a request and return its fault, or None."""
        with self.lock:
            self.requests.append(body)
            if self.chance is not None:
                weights = [*self.mixture.values(), 1000 - sum(self.mixture.values())]
                return self.chance.choices([*self.mixture, None], weights)[0]
            if key in self.said:
                return self.every or (self.said[key] if self.wrong_again else None)
            self.said[key] = self.faults.get(len(self.said))
            return self.every or self.said[key]

    def usd(self, prices: dict[str, Any]) -> float:
        """Return the total of the bill in dollars; `prices` is a price file with one model."""
        (model_prices,) = prices["usd_per_million_tokens"].values()
        return sum(billed.usd(model_prices) for billed in self.bill.values())

    def reply(self, asking: dict[str, Any], fault: str | None, id: str) -> dict[str, Any]:
        """Bill a request and return the reply of the model."""
        scores = self.scorer(json.loads(asking["messages"][1]["content"]))
        grades = [{"label": label, "comment": COMMENT, "score": value} for label, value in scores.items()]
        text, refusal = spoil(json.dumps({"grades": grades}), grades, fault), None
        if fault == "refusal":
            text, refusal = "", "I cannot grade this."
        limit = asking["max_completion_tokens"]
        input_tokens = len(json.dumps(asking)) // 4
        output_tokens = 20_000 if fault == "long" else len(text) // 4 + 1
        cut = fault == "cut off" or output_tokens > limit
        if cut:
            text, output_tokens = text[: len(text) // 2], min(output_tokens, limit)
        cached_tokens = input_tokens // 2
        with self.lock:
            self.bill[id] = Billed(input=input_tokens, cached=cached_tokens, output=output_tokens)
        usage = {"prompt_tokens": input_tokens, "completion_tokens": output_tokens}
        usage |= {"total_tokens": input_tokens + output_tokens}
        reported_cached = 10 * input_tokens if fault == "more cached than read" else cached_tokens
        usage["prompt_tokens_details"] = {"cached_tokens": reported_cached}
        usage = WRONG_USAGES.get(fault or "", usage)
        if fault == "error in 200":
            return {"error": {"message": "scripted overload", "code": 529}, "usage": None}
        message = {"role": "assistant", "content": None if refusal else text, "refusal": refusal}
        choice = {"index": 0, "message": message, "finish_reason": "length" if cut else "stop"}
        return {
            "id": f"chatcmpl-{self.billed}",
            "object": "chat.completion",
            "created": 0,
            "model": self.snapshot,
            "choices": {"0": {}} if fault == "odd choices" else [choice],
            "usage": usage,
        }


def spoil(text: str, grades: list[dict[str, Any]], fault: str | None) -> str:
    """Return a verdict that has the fault."""
    first, *rest = grades
    wrong = {
        "wrong labels": [{**first, "label": "Z"}, *rest],
        "missing label": rest,
        "duplicate label": [first, first, *rest],
        "too high": [{**first, "score": 101}, *rest],
        "no number": [{**first, "score": "high"}, *rest],
        "numbers in strings": [{**grade, "score": str(grade["score"])} for grade in grades],
        "halves": [{**grade, "score": float(grade["score"])} for grade in grades],
    }
    if fault == "fenced":
        return f"```json\n{text}\n```"
    if fault in wrong:
        return json.dumps({"grades": wrong[fault]})
    return {"cut off": text[: len(text) // 2], "prose": "I like the first one best."}.get(fault or "", text)


class Handler(QuietHandler):
    """Handles requests to the server's judge."""

    def do_POST(self) -> None:
        data = self.received()
        if len(data) < int(self.headers["Content-Length"]):
            self.close_connection = True  # the client was killed
            return
        assert self.path == "/v1/chat/completions"
        self.give_verdict(self.server.judge, json.loads(data))  # type: ignore[attr-defined]  # set by `serve`

    def give_verdict(self, judge: Judge, body: dict[str, Any]) -> None:  # noqa: PLR0911  # a return for each kind of fault
        assert "temperature" not in body and "seed" not in body
        key, id = self.headers["Idempotency-Key"], self.headers["X-Client-Request-Id"]
        fault = judge.fault_of(key.partition("-")[0], body)
        if fault in API_FAULTS:
            error = {"error": {"message": f"scripted {fault}", "type": "scripted", "code": None}}
            return self.send_content(json.dumps(error).encode(), int(fault), {"Retry-After": judge.retry_after})
        if fault == "echo":
            error = {"error": {"message": f"wrong key: {self.headers['Authorization']}", "code": "invalid_api_key"}}
            return self.send_content(json.dumps(error).encode(), 401)
        if fault in ("redirect", "echo in any spelling"):
            content = echoed_reply(self.headers["Authorization"].removeprefix("Bearer "))
            elsewhere = {"Location": "http://localhost:1/v1/chat/completions"}
            return self.send_content(*((b"", 307, elsewhere) if fault == "redirect" else (content, 200)))
        if fault == "dropped":
            return self.drop()
        reply_key = key if judge.idempotent else id
        if reply_key not in judge.replies:
            judge.replies[reply_key] = judge.reply(body, fault, id)
        if fault == "slow":
            judge.released.wait(judge.slow_seconds)
        if fault == "billed and dropped":
            return self.drop()
        if fault in GATEWAY_FAULTS:
            return self.send_content(b"<html>Bad gateway</html>", int(fault), {"Content-Type": "text/html"})
        content = json.dumps(judge.replies[reply_key]).encode()
        if fault == "repeated key":
            content = b'{"tier": 1, "tier": 2, ' + content[1:]
        if fault == "half a body":
            content = content[:100]
        return self.send_content(content, sent=100 if fault == "less than a body" else None)

    def drop(self) -> None:
        """Close the connection without a response."""
        self.close_connection = True
        self.connection.shutdown(2)


def echoed_reply(key: str) -> bytes:
    """Return a reply that contains its client's key in many JSON spellings."""
    escaped = "".join(f"\\u{ord(character):04x}" for character in key)
    nested = json.dumps(key.replace("/", "\\/"))[1:-1]
    spellings = (key, key.replace("/", "\\/"), key.replace("+", "\\u002B"), escaped, nested, json.dumps(escaped)[1:-1])
    text = " ".join(spellings)
    choice = f'{{"index": 0, "finish_reason": "stop", "message": {{"content": "{text}", "refusal": null}}}}'
    usage = '{"prompt_tokens": 10, "completion_tokens": 10}'
    return f'{{"id": "{escaped}", "model": "{text}", "choices": [{choice}], "usage": {usage}}}'.encode()


@contextmanager
def serve(scorer: Scorer) -> Iterator[Judge]:
    """Run the server in a thread while the context lasts; yield its judge."""
    judge = Judge(scorer)
    with serving(Handler) as server:
        server.judge = judge  # type: ignore[attr-defined]
        judge.url = f"{server.url}/v1"
        try:
            yield judge
        finally:
            judge.released.set()
