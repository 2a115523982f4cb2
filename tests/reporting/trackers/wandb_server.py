"""A W&B server on loopback. It can do what a run needs: begin or continue the run, and receive its data.

As on W&B's own servers, lines of a history have offsets, so that a line that is sent twice is stored once.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from tests.loopback import QuietHandler, serving

HISTORY = "wandb-history.jsonl"
ENTITY = "someone"
UNSAID = dict.fromkeys(("displayName", "description", "sweepName", "notes"))
RUN = UNSAID | {"id": "run", "state": "finished", "tags": [], "user": {}}
OPERATION = re.compile(r"(?:query|mutation) (\w+)")
NO_LOGS = {"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "wandbConfig": '{"t": 1}'}


@attrs.define
class WandbServer:
    """What the server has stored and answered. The keys of `histories` and `configs` are run ids."""

    address: str = ""
    histories: dict[str, list[str]] = attrs.field(factory=dict)  # lines of JSON
    configs: dict[str, str] = attrs.field(factory=dict)  # JSON
    answered: int = 0  # number of requests that contained history and were answered
    answers: int | None = None  # after this many requests with history, all later requests fail; None: never

    def values(self, run: str) -> dict[str, dict[int, Any]]:
        """Return the values in a run's history, by name and step."""
        values_by_name: dict[str, dict[int, Any]] = {}
        for record in map(json.loads, self.histories[run]):
            for name, value in record.items():
                assert record["_step"] not in values_by_name.setdefault(name, {}), "a step occurs twice"
                values_by_name[name][record["_step"]] = value
        return values_by_name

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request, or None if the server fails."""
        if path.startswith("/files/"):
            return self._take(path.split("/")[4], request)
        if path != "/graphql":
            return {}
        operation = OPERATION.search(request["query"])
        return {"data": self._data(operation[1] if operation else "", request.get("variables") or {})}

    def _data(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        run, data = variables.get("name", ""), {}
        match operation:
            case "Viewer" | "GetDefaultEntity":
                data = {"viewer": {"id": "u", "entity": ENTITY, "username": ENTITY, "flags": "{}"}}
            case "RunResumeStatus":
                data = {"model": {"id": "p", "name": variables["project"], "bucket": self._bucket(run, variables)}}
            case "Run" | "RunHistoryKeys":  # requests of W&B's interface for reading runs
                data = {"project": {"run": self._bucket(run, variables)}}
            case "UpsertBucket":
                inserted = run not in self.histories
                self.histories.setdefault(run, [])
                self.configs[run] = variables["config"] or self.configs.get(run, "{}")
                data = {"upsertBucket": {"bucket": self._bucket(run, variables), "inserted": inserted}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.address}/upload"} for name in variables["files"]]
                data = {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        return data

    def _bucket(self, run: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        """Return a run in W&B's format, or None if it does not exist."""
        if run not in self.histories:
            return None
        lines = self.histories[run]
        return (
            RUN
            | NO_LOGS
            | {"name": run, "config": self.configs[run], "historyLineCount": len(lines)}
            | {"historyTail": json.dumps(lines[-1:]), "summaryMetrics": lines[-1] if lines else "{}"}
            | {"historyKeys": {"lastStep": json.loads(lines[-1])["_step"]} if lines else None}
            | {"project": {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": ENTITY}}}
        )

    def _take(self, run: str, request: dict[str, Any]) -> dict[str, Any] | None:
        if (sent := request.get("files", {}).get(HISTORY)) is not None:
            if self.answered == self.answers:
                return None
            self.answered += 1
            first = sent["offset"]
            if first > len(self.histories[run]):  # lines are missing
                return None
            self.histories[run][first : first + len(sent["content"])] = sent["content"]
        return {}


@contextmanager
def serve_wandb() -> Iterator[WandbServer]:
    """Run the server on a free port."""
    server = WandbServer()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = self.received()
            takes = self.path == "/graphql" or self.path.startswith("/files/")
            answer = server.answer(self.path, json.loads(body) if takes else {})
            self.send_content(*((b"", 400) if answer is None else (json.dumps(answer).encode(), 200)))

        do_PUT = do_POST

    with serving(Handler) as http:
        server.address = http.url
        yield server
