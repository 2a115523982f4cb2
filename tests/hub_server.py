"""A small Hugging Face hub on loopback: enough of its HTTP interface for the real client libraries."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Datasets by "OWNER/NAME", each a folder, and what was asked of them."""

    def __init__(self, datasets: dict[str, Path]):
        self.datasets = datasets
        self.requests: list[str] = []
        self.cut_after_bytes: int | None = None  # the next file transfer breaks off there
        self.url = ""


@contextmanager
def serve(datasets: dict[str, Path]) -> Iterator[Hub]:
    """Serve the datasets while the context lasts."""
    hub = Hub(datasets)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            fields = self.rfile.read(length)
            self.answer(body=True, posted=fields)

        def answer(self, *, body: bool, posted: bytes = b"") -> None:
            path = unquote(urlparse(self.path).path)
            hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
            for name, folder in hub.datasets.items():
                if path.startswith(f"/api/datasets/{name}"):
                    return self.describe(path.removeprefix(f"/api/datasets/{name}"), name, folder, posted)
                prefix = f"/datasets/{name}/resolve/"
                if path.startswith(prefix):
                    return self.file(folder / path.removeprefix(prefix).partition("/")[2], body=body)
            return self.send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})

        def describe(self, rest: str, name: str, folder: Path, posted: bytes) -> None:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            entries = [
                {"type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": etag(path)}
                for path in files
            ]
            if rest.startswith("/tree/"):
                under = rest.split("/", 3)[3] if rest.count("/") > 2 else ""
                recursive = "recursive=true" in urlparse(self.path).query.lower()
                return self.send(200, json.dumps(tree(entries, under, recursive=recursive)).encode())
            if rest.startswith("/paths-info/"):
                wanted = json.loads(posted).get("paths", []) if posted.startswith(b"{") else []
                return self.send(200, json.dumps([e for e in entries if e["path"] in wanted]).encode())
            siblings = [{"rfilename": entry["path"]} for entry in entries]
            info = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            return self.send(200, json.dumps(info).encode())

        def file(self, path: Path, *, body: bool) -> None:
            if not path.is_file():
                return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            data = path.read_bytes()
            headers = {"ETag": f'"{etag(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            status, first, last = 200, 0, len(data) - 1
            if asked := self.headers.get("Range"):
                begin, _, end = asked.removeprefix("bytes=").partition("-")
                first, last = int(begin or 0), min(int(end or last), last)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                status = 206
            part = data[first : last + 1]
            if body and hub.cut_after_bytes is not None and len(part) > hub.cut_after_bytes:
                self.start(status, len(part), headers)
                self.wfile.write(part[: hub.cut_after_bytes])
                hub.cut_after_bytes = None
                self.close_connection = True
                return None
            return self.send(status, part, headers, body=body)

        def start(self, status: int, length: int, headers: dict[str, str] | None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(length), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()

        def send(self, status: int, data: bytes, headers: dict[str, str] | None = None, *, body: bool = True) -> None:
            self.start(status, len(data), {"Content-Type": "application/json", **(headers or {})})
            if body and self.command != "HEAD":
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def tree(entries: list[dict[str, object]], under: str, *, recursive: bool) -> list[dict[str, object]]:
    """Return the files below a folder; unless recursive, those in it and the folders in it."""
    prefix = f"{under}/" if under else ""
    below = [entry for entry in entries if str(entry["path"]).startswith(prefix)]
    if recursive:
        return below
    direct = [entry for entry in below if "/" not in str(entry["path"]).removeprefix(prefix)]
    deeper = {str(entry["path"]).removeprefix(prefix).partition("/")[0] for entry in below if entry not in direct}
    folders = [{"type": "directory", "path": prefix + name, "size": 0, "oid": "0" * 40} for name in sorted(deeper)]
    return folders + direct


def etag(path: Path) -> str:
    """Return the identity of a file's content."""
    return hashlib.sha1(path.read_bytes()).hexdigest()
