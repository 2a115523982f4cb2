"""An OpenAI-compatible server on loopback whose model is a function, and whose faults are scripted.

It keeps its own bill, by the id of each request, and answers a repeated Idempotency-Key with the reply that it has
billed, unless it is told not to know that header.
"""

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from tests.loopback import QuietHandler, serving

Scorer = Callable[[dict[str, Any]], dict[str, int]]  # from what is asked to a score for each label
API_FAULTS = ("400", "401", "402", "404", "429", "500", "503")  # statuses, with the API's error object: not billed
GATEWAY_FAULTS = ("408", "425", "499", "502", "504")  # billed by what is behind the gateway, which answers with a page
WRONG_USAGES: dict[str, Any] = {  # what is said of the tokens, whatever is billed
    "no usage": None,
    "usage of text": {"prompt_tokens": "many"},
    "negative usage": {"prompt_tokens": -5, "completion_tokens": -7},
    "usage of zeros": {"prompt_tokens": 0, "completion_tokens": 0},
    "huge usage": {"prompt_tokens": 10**30, "completion_tokens": 1},
    "usage a list": [1, 2],
}
# Of every request by chance: fault, and how many in 1000. The others are answered as they should be.
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
    """One request, as billed."""

    input: int
    cached: int
    output: int

    def usd(self, prices: dict[str, float]) -> float:
        """Return what it costs."""
        usd = (self.input - self.cached) * prices["input"] + self.cached * prices["cached_input"]
        return (usd + self.output * prices["output"]) / 1e6


class Judge:
    """What the server is, has been asked, and has billed."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer
        self.url = ""
        self.faults: dict[int, str] = {}  # by number of the prompt, from 0; of its first request only
        self.every: str | None = None  # the fault of all requests
        self.chance: random.Random | None = None  # draws a fault of `mixture` for each request
        self.mixture = MIXTURE
        self.idempotent = True
        self.wrong_again = False  # what a prompt has once been answered it is answered again
        self.said: dict[str, str | None] = {}  # the fault of each prompt, by its key, as they came
        self.snapshot = "scripted"  # what it calls its model
        self.bill: dict[str, Billed] = {}  # by X-Client-Request-Id
        self.slow_seconds = 1.0
        self.retry_after = "0.05"  # seconds, with each fault that has a status
        self.released = threading.Event()  # nothing is slow any more
        self.requests: list[dict[str, Any]] = []  # bodies
        self.replies: dict[str, dict[str, Any]] = {}  # by Idempotency-Key
        self.lock = threading.Lock()

    @property
    def billed(self) -> int:
        return len(self.bill)

    def fault_of(self, key: str, body: dict[str, Any]) -> str | None:
        """Note a request and return what goes wrong with it."""
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
        """Return the whole bill, by a file of prices with one model."""
        (of_model,) = prices["usd_per_million_tokens"].values()
        return sum(one.usd(of_model) for one in self.bill.values())

    def reply(self, asking: dict[str, Any], fault: str | None, id: str) -> dict[str, Any]:
        """Bill a request and return what a model says to it."""
        scores = self.scorer(json.loads(asking["messages"][1]["content"]))
        grades = [{"label": label, "comment": COMMENT, "score": value} for label, value in scores.items()]
        text, refusal = spoil(json.dumps({"grades": grades}), grades, fault), None
        if fault == "refusal":
            text, refusal = "", "I cannot grade this."
        limit = asking["max_completion_tokens"]
        read, said = len(json.dumps(asking)) // 4, 20_000 if fault == "long" else len(text) // 4 + 1
        cut = fault == "cut off" or said > limit
        if cut:
            text, said = text[: len(text) // 2], min(said, limit)
        with self.lock:
            self.bill[id] = Billed(input=read, cached=read // 2, output=said)
        usage = {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}
        usage["prompt_tokens_details"] = {"cached_tokens": 10 * read if fault == "more cached than read" else read // 2}
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
    """Return a verdict that is wrong in one way."""
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
    """Answers for the judge of its server."""

    def do_POST(self) -> None:
        data = self.received()
        if len(data) < int(self.headers["Content-Length"]):
            self.close_connection = True  # the client was killed
            return
        assert self.path == "/v1/chat/completions"
        self.give_verdict(self.server.judge, json.loads(data))  # type: ignore[attr-defined]  # serve puts it there

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
        kept = key if judge.idempotent else id
        if kept not in judge.replies:
            judge.replies[kept] = judge.reply(body, fault, id)
        if fault == "slow":
            judge.released.wait(judge.slow_seconds)
        if fault == "billed and dropped":
            return self.drop()
        if fault in GATEWAY_FAULTS:
            return self.send_content(b"<html>Bad gateway</html>", int(fault), {"Content-Type": "text/html"})
        content = json.dumps(judge.replies[kept]).encode()
        if fault == "repeated key":
            content = b'{"tier": 1, "tier": 2, ' + content[1:]
        if fault == "half a body":
            content = content[:100]
        return self.send_content(content, sent=100 if fault == "less than a body" else None)

    def drop(self) -> None:
        """End the connection without a word."""
        self.close_connection = True
        self.connection.shutdown(2)


def echoed_reply(key: str) -> bytes:
    """Return an answer that has its client's key in many spellings of JSON."""
    escaped = "".join(f"\\u{ord(character):04x}" for character in key)
    nested = json.dumps(key.replace("/", "\\/"))[1:-1]
    spellings = (key, key.replace("/", "\\/"), key.replace("+", "\\u002B"), escaped, nested, json.dumps(escaped)[1:-1])
    said = " ".join(spellings)
    choice = f'{{"index": 0, "finish_reason": "stop", "message": {{"content": "{said}", "refusal": null}}}}'
    usage = '{"prompt_tokens": 10, "completion_tokens": 10}'
    return f'{{"id": "{escaped}", "model": "{said}", "choices": [{choice}], "usage": {usage}}}'.encode()


@contextmanager
def serve(scorer: Scorer) -> Iterator[Judge]:
    """Run the server in a thread for as long as the context lasts; yield what it is."""
    judge = Judge(scorer)
    with serving(Handler) as server:
        server.judge = judge  # type: ignore[attr-defined]
        judge.url = f"{server.url}/v1"
        try:
            yield judge
        finally:
            judge.released.set()
