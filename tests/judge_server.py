"""An OpenAI-compatible server on loopback whose model is a function, and whose faults are scripted.

It keeps its own bill, by the id of each request, and answers a repeated Idempotency-Key with the reply that it has
billed, unless it is told not to know that header. By itself it is a judge to try commands with:
`python -m tests.judge_server --port 8123 --records instructions.json`.
"""

import argparse
import hashlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import attrs

from tests.loopback import serving

Scorer = Callable[[dict[str, Any]], dict[str, int]]  # from what is asked to a score for each label
HTTP_FAULTS = {"429": 429, "500": 500, "503": 503, "401": 401, "400": 400, "402": 402, "404": 404}
GATEWAY_FAULTS = {
    "502": 502,
    "504": 504,
    "408": 408,
    "425": 425,
    "499": 499,
}  # billed by what is behind the gateway, which answers with a page
WRONG_USAGES: dict[str, Any] = {  # what is said of the tokens, whatever is billed
    "no usage": None,
    "usage of text": {"input_tokens": "many", "prompt_tokens": "many"},
    "negative usage": {"input_tokens": -5, "prompt_tokens": -5, "output_tokens": -7, "completion_tokens": -7},
    "usage of zeros": {"input_tokens": 0, "prompt_tokens": 0, "output_tokens": 0, "completion_tokens": 0},
    "huge usage": {"input_tokens": 10**30, "prompt_tokens": 10**30, "output_tokens": 1, "completion_tokens": 1},
    "usage a list": [1, 2],
}
ODD_LINES = ("line of a string", "line of a list", "line of an object", "line that is no JSON", "no line")  # in batches
# Of every request by chance: fault, and how many in 1000. The others are answered as they should be.
MIXTURE = {
    **dict.fromkeys(("429", "500", "503", "dropped", "reset"), 20),
    **dict.fromkeys(("408", "425", "499"), 10),
    **dict.fromkeys(("502", "504", "billed and dropped", "billed and reset", "half a body", "less than a body"), 15),
    **dict.fromkeys(("slow", "drip", "endless"), 10),
    **dict.fromkeys(("cut off", "prose", "wrong labels", "too high", "error in 200", "odd choices", "long"), 12),
    **dict.fromkeys(("fenced", "numbers in strings", "halves", "repeated key"), 25),
    **dict.fromkeys((*WRONG_USAGES, "more cached than read"), 10),
}
COMMENT = "follows the instruction closely, but one of the facts that it names is not right"
BATCH_MIXTURE = {
    **dict.fromkeys(ODD_LINES, 15),
    **dict.fromkeys(("400", "500", "duplicate line", "repeated key", "refusal"), 20),
    **dict.fromkeys(("cut off", "prose", "wrong labels", "error in 200", "fenced", "long", *WRONG_USAGES), 15),
}


@attrs.define(kw_only=True)
class Billed:
    """One request, as billed."""

    key: str
    input: int
    cached: int
    output: int
    batch: bool = False
    answered: bool = False  # whole, as far as the server knows

    def usd(self, prices: dict[str, float], discount: float) -> float:
        """Return what it costs."""
        usd = (self.input - self.cached) * prices["input"] + self.cached * prices["cached_input"]
        return (usd + self.output * prices["output"]) / 1e6 * (1 - discount if self.batch else 1)


class Judge:
    """What the server is, has been asked, and has billed."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer
        self.url = ""
        self.faults: dict[int, str] = {}  # by number of the prompt, from 0; of its first request only
        self.every: str | None = None  # the fault of all requests
        self.usage: Callable[[dict[str, Any]], Any] = lambda counted: counted  # what it says instead
        self.chance: random.Random | None = None  # draws a fault of `mixture` for each request
        self.mixture = MIXTURE
        self.idempotent = True
        self.wrong_again = False  # what a prompt has once been answered it is answered again
        self.said: dict[str, str | None] = {}  # the fault of each prompt
        self.ignores_limit = False  # of the tokens of a reply
        self.redirect_to = ""
        self.snapshot = "scripted"  # what it calls its model
        self.content: bytes | None = None  # what it answers in place of anything else
        self.authorizations: set[str] = set()  # headers that it has got
        self.bill: dict[str, Billed] = {}  # by X-Client-Request-Id, or a number in a batch
        self.path_faults: dict[str, str] = {}  # by beginning of "METHOD /path", once each: a status, or "lost" reply
        self.slow_seconds = 1.0
        self.retry_after = "0.05"  # seconds, with each fault that has a status
        self.times: list[float] = []  # when each of `requests` came
        self.released = threading.Event()  # nothing is slow any more
        self.requests: list[dict[str, Any]] = []  # bodies of those that asked for a verdict, in batches too
        self.prompts: list[str] = []  # their keys, as they came
        self.paths: list[str] = []
        self.billed = 0  # replies
        self.replies: dict[str, dict[str, Any]] = {}  # by Idempotency-Key
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.unlisted: set[str] = set()  # batches that are there, and in no list
        self.page_of_batches = 100
        self.batch_end = "completed"
        self.polls_before_end = 1
        self.lock = threading.Lock()

    def fault_of(self, key: str, body: dict[str, Any]) -> str | None:
        """Note a request and return what goes wrong with it."""
        with self.lock:
            self.requests.append(body)
            self.times.append(time.monotonic())
            if self.chance is not None:
                weights = [*self.mixture.values(), 1000 - sum(self.mixture.values())]
                return self.chance.choices([*self.mixture, None], weights)[0]
            if key in self.prompts:
                return self.every or (self.said[key] if self.wrong_again else None)
            self.prompts.append(key)
            self.said[key] = self.faults.get(len(self.prompts) - 1)
            return self.every or self.said[key]

    def path_fault(self, asked: str) -> str | None:
        """Return what goes wrong with a path this time."""
        with self.lock:
            beginning = next((beginning for beginning in self.path_faults if asked.startswith(beginning)), None)
            return None if beginning is None else self.path_faults.pop(beginning)

    def usd(self, prices: dict[str, Any]) -> float:
        """Return the whole bill, by a file of prices with one model."""
        (of_model,) = prices["usd_per_million_tokens"].values()
        return sum(one.usd(of_model, prices["batch_discount"]) for one in self.bill.values())

    def reply(self, path: str, asking: dict[str, Any], fault: str | None, id: str, key: str) -> dict[str, Any]:
        """Bill a request and return what a model says to it."""
        responses = path.endswith("/responses")
        asked = asking["input"] if responses else asking["messages"][1]["content"]
        limit = asking["max_output_tokens" if responses else "max_completion_tokens"]
        scores = self.scorer(json.loads(asked))
        grades = [{"label": label, "comment": COMMENT, "score": value} for label, value in scores.items()]
        text, refusal = spoil(json.dumps({"grades": grades}), grades, fault), None
        if fault == "refusal":
            text, refusal = "", "I cannot grade this."
        read, said = len(json.dumps(asking)) // 4, len(text) // 4 + 1
        if fault == "long":
            said = 20_000
        cut = fault == "cut off" or (said > limit and not self.ignores_limit)
        if cut:
            text, said = text[: len(text) // 2], min(said, limit)
        with self.lock:
            self.billed += 1
            number = self.billed
            self.bill[id] = Billed(key=key, input=read, cached=read // 2, output=said, batch=id.startswith("batch"))
        body = (response if responses else completion)(number, text, refusal, (read, said), cut=cut)
        usage = WRONG_USAGES.get(fault or "", self.usage(body["usage"]))
        body["model"] = self.snapshot
        if fault == "more cached than read":
            details = {"cached_tokens": 10 * read}
            usage = {**usage, "input_tokens_details": details, "prompt_tokens_details": details}
        if fault == "error in 200":
            return {"error": {"message": "scripted overload", "code": 529}, "usage": None}
        if fault == "odd choices":
            return {**body, "output": {"0": 1}, "choices": {"0": {}}, "usage": usage}
        return body | {"usage": usage}

    def run_batch(self, batch: dict[str, Any]) -> None:
        """Answer a batch's requests; those with a fault go into the file of errors."""
        done, failed = [], []
        for line in self.files[batch["input_file_id"]].decode().splitlines():
            row = json.loads(line)
            fault = self.fault_of(row["custom_id"], row["body"])
            if fault in HTTP_FAULTS:
                error = {"message": "scripted", "code": "server_error"}
                refused = {"status_code": 400, "body": {"error": error}} if fault == "400" else None
                without = {"custom_id": row["custom_id"], "response": refused, "error": None if refused else error}
                failed.append(json.dumps(without))
                continue
            body = self.reply(row["url"], row["body"], fault, f"{batch['id']} {len(self.bill)}", row["custom_id"])
            answer = {"custom_id": row["custom_id"], "response": {"status_code": 200, "body": body}, "error": None}
            odd: dict[str | None, Any] = {
                "line of a string": {**answer, "response": {"status_code": 200, "body": "none"}},
                "line of a list": {**answer, "custom_id": [row["custom_id"]]},
                "line of an object": {**answer, "response": {"status_code": 200, "body": {"choices": {"0": {}}}}},
            }
            if fault == "line that is no JSON":
                done.append("{" * 3)
            elif fault == "repeated key":
                done.append('{"tier": 1, "tier": 2, ' + json.dumps(answer)[1:])
            elif fault != "no line":
                done += [json.dumps(odd.get(fault, answer))] * (2 if fault == "duplicate line" else 1)
        for key, rows in (("output_file_id", done), ("error_file_id", failed)):
            if rows:
                name = f"file-{batch['id']}-{key}"
                self.files[name] = "\n".join(reversed(rows)).encode()  # in no order
                batch[key] = name
        batch["status"] = self.batch_end
        batch["request_counts"] = {"total": len(done) + len(failed), "completed": len(done), "failed": len(failed)}


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


def response(number: int, text: str, refusal: str | None, used: tuple[int, int], *, cut: bool) -> dict[str, Any]:
    """Return a body of the Responses API; the model has thought before it spoke."""
    said = {"type": "output_text", "text": text, "annotations": []}
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0,
        "model": "scripted",
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [said if refusal is None else {"type": "refusal", "refusal": refusal}],
            },
        ],
        "usage": {
            "input_tokens": used[0],
            "input_tokens_details": {"cached_tokens": used[0] // 2, "cache_write_tokens": 0},
            "output_tokens": used[1],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": sum(used),
        },
    }


def completion(number: int, text: str, refusal: str | None, used: tuple[int, int], *, cut: bool) -> dict[str, Any]:
    """Return a body of chat completions."""
    message = {"role": "assistant", "content": None if refusal else text, "refusal": refusal}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": "length" if cut else "stop"}],
        "usage": {
            "prompt_tokens": used[0],
            "prompt_tokens_details": {"cached_tokens": used[0] // 2},
            "completion_tokens": used[1],
            "total_tokens": sum(used),
        },
    }


class Handler(BaseHTTPRequestHandler):
    """Answers for the judge of its server."""

    protocol_version = "HTTP/1.1"

    @property
    def judge(self) -> Judge:
        return self.server.judge  # type: ignore[attr-defined]  # serve puts it there

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.begins_with_a_fault():
            return None
        parts = self.path.partition("?")[0].split("/")[2:]
        if parts[0] == "files":
            return self.answer_bytes(self.judge.files[parts[1]])
        if parts == ["batches"]:
            return self.list_batches(dict(parse_qsl(self.path.partition("?")[2])))
        batch = self.judge.batches.get(parts[1])
        if batch is None:
            return self.answer({"error": {"message": "No such batch"}}, 404)
        batch["polls"] += 1
        if batch["status"] == "in_progress" and batch["polls"] > self.judge.polls_before_end:
            self.judge.run_batch(batch)
        return self.answer(batch)

    def list_batches(self, asked: dict[str, str]) -> None:
        """Answer with a page, the newest batches first."""
        names = [name for name in reversed(self.judge.batches) if name not in self.judge.unlisted]
        begin = names.index(asked["after"]) + 1 if "after" in asked else 0
        end = begin + self.judge.page_of_batches
        page = [self.judge.batches[name] for name in names[begin:end]]
        self.answer({"object": "list", "data": page, "has_more": end < len(names)})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if len(data) < int(self.headers["Content-Length"]):
            self.close_connection = True  # the client was killed
            return None
        if self.begins_with_a_fault():
            return None
        if self.path == "/v1/files":
            return self.take_file(data)
        body = json.loads(data)
        if self.path == "/v1/batches":
            return self.take_batch(body)
        return self.give_verdict(body)

    def begins_with_a_fault(self) -> bool:
        """Note the path. True: it was answered with a scripted status; a reply to be lost gets lost later."""
        asked = f"{self.command} {self.path}"
        self.judge.paths.append(asked)
        fault = self.judge.path_fault(asked)
        self.lost = fault == "lost"
        if fault in HTTP_FAULTS:
            self.answer({"error": {"message": f"scripted {fault}", "code": None}}, HTTP_FAULTS[fault])
        return fault in HTTP_FAULTS

    def take_file(self, data: bytes) -> None:
        """Keep the file of a form: the part that is lines of JSON."""
        boundary = self.headers["Content-Type"].partition("boundary=")[2].encode()
        parts = [part.partition(b"\r\n\r\n")[2].rstrip(b"\r\n-") for part in data.split(boundary)]
        name = f"file-{len(self.judge.files)}"
        self.judge.files[name] = next(part for part in parts if part.startswith(b"{"))
        self.answer(
            {
                "id": name,
                "object": "file",
                "bytes": 0,
                "created_at": 0,
                "filename": "",
                "purpose": "batch",
                "status": "",
            }
        )

    def take_batch(self, body: dict[str, Any]) -> None:
        assert body["completion_window"] == "24h"
        name = f"batch_{len(self.judge.batches)}"
        batch = {"id": name, "object": "batch", "created_at": 0, "status": "in_progress", "polls": 0, **body}
        self.judge.batches[name] = batch
        self.answer(batch)

    def give_verdict(self, body: dict[str, Any]) -> None:  # noqa: PLR0911, PLR0912  # a return for each way to fail
        judge, key = self.judge, self.headers["Idempotency-Key"]
        id = self.headers["X-Client-Request-Id"]
        fault = judge.fault_of(key.partition("-")[0], body)
        judge.authorizations.add(self.headers["Authorization"])
        if judge.content is not None:
            return self.answer_bytes(judge.content)
        assert "temperature" not in body and "seed" not in body
        if fault in HTTP_FAULTS:
            error = {"error": {"message": f"scripted {fault}", "type": "scripted", "code": None}}
            return self.answer(error, HTTP_FAULTS[fault], {"Retry-After": judge.retry_after})
        if fault == "echo":
            said = f"wrong key: {self.headers['Authorization']}"
            return self.answer({"error": {"message": said, "code": "invalid_api_key"}}, 401)
        if fault == "redirect":
            return self.answer({}, 307, {"Location": judge.redirect_to})
        if fault in ("dropped", "reset"):
            return self.drop(reset=fault == "reset")
        kept = key if judge.idempotent else id
        if kept not in judge.replies:
            judge.replies[kept] = judge.reply(self.path, body, fault, id, key.partition("-")[0])
        if fault == "slow":
            judge.released.wait(judge.slow_seconds)
        if fault in ("billed and dropped", "billed and reset"):
            return self.drop(reset=fault == "billed and reset")
        if fault in GATEWAY_FAULTS:
            return self.answer_bytes(b"<html>Bad gateway</html>", GATEWAY_FAULTS[fault], {"Content-Type": "text/html"})
        content = json.dumps(judge.replies[kept]).encode()
        if fault == "repeated key":
            content = b'{"tier": 1, "tier": 2, ' + content[1:]
        if fault == "half a body":
            return self.answer_bytes(content[:100])
        if fault == "less than a body":
            return self.answer_bytes(content[:100], length=len(content))
        if fault in ("drip", "endless"):
            return self.go_on(content, endless=fault == "endless")
        if self.answer_bytes(content) and id in judge.bill:
            judge.bill[id].answered = True
        return None

    def go_on(self, content: bytes, *, endless: bool) -> None:
        """Send a reply in pieces of 8 bytes a second, or one without an end."""
        try:
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 40 if endless else len(content)))
            self.end_headers()
            while not self.judge.released.is_set():
                self.wfile.write(b" " * (1 << 20) if endless else content[:8])
                content = content[8:] or b" "
                if not endless:
                    self.judge.released.wait(1)
        except OSError:
            pass  # the client has had enough
        self.close_connection = True

    def drop(self, *, reset: bool = False) -> None:
        """End the connection without a word, or with a reset."""
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            self.connection.shutdown(2)

    def answer(self, body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.answer_bytes(json.dumps(body).encode(), status, headers or {})

    def answer_bytes(
        self, data: bytes, status: int = 200, headers: dict[str, str] | None = None, length: int | None = None
    ) -> bool:
        """Send a reply, and say that it has `length` bytes; False: the client has not waited."""
        if self.lost:
            self.drop()
            return False
        try:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) if length is None else length))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True
            return False
        self.close_connection = self.close_connection or length is not None
        return True


@contextmanager
def serve(scorer: Scorer, port: int = 0) -> Iterator[Judge]:
    """Run the server in a thread for as long as the context lasts; yield what it is."""
    judge = Judge(scorer)
    with serving(Handler, port) as server:
        server.judge = judge  # type: ignore[attr-defined]
        judge.url = f"{server.url}/v1"
        try:
            yield judge
        finally:
            judge.released.set()


def overlap_scorer(records: list[dict[str, str]]) -> Scorer:
    """Return a judge that knows the references: words in common with them, and a little noise of its own."""
    references = {(row["instruction"], row.get("input", "")): row["output"] for row in records}

    def score(asked: dict[str, Any]) -> dict[str, int]:
        reference = references[asked["instruction"], asked.get("input", "")]
        return {label: grade(text, reference) for label, text in asked["answers"].items()}

    def grade(text: str, reference: str) -> int:
        if text.strip() == reference.strip():
            return 97
        ours, theirs = set(text.lower().split()), set(reference.lower().split())
        shared = len(ours & theirs) / max(1, len(ours | theirs))
        noise = hashlib.sha256(text.encode()).digest()[0] % 11 - 5
        return max(0, min(95, round(90 * shared) + noise))

    return score


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--records", type=Path, required=True, help="the questions, with references")
    options = parser.parse_args()
    with serve(overlap_scorer(json.loads(options.records.read_text())), options.port) as running:
        print(running.url, flush=True)
        threading.Event().wait()
