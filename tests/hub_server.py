"""A small Hugging Face hub on loopback, with enough of its HTTP interface for the real client libraries."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlparse

from tests.loopback import QuietHandler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".png")  # suffixes of large files, as in the .gitattributes of a new dataset
TOKEN = "hf_write"  # the only token with write access, and only to OWNER's repositories
OWNER = "owner"


class Hub:
    """Folders of datasets and models by "OWNER/NAME", and the requests so far."""

    def __init__(self, datasets: dict[str, Path]):
        self.datasets = datasets
        self.requests: list[str] = []
        self.cut_after_bytes: int | None = None  # where the next file transfer breaks off; None means never
        self.url = ""
        self.new: Path | None = None  # the folder for datasets that clients create
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}  # uploaded large files by sha256, committed or not
        self.commits: list[list[str]] = []  # names of the files in each commit
        # gets the size of an upload; returns whether the upload succeeds
        self.before_upload: Callable[[int], bool] = lambda size: True


class Handler(QuietHandler):
    """Handles requests to the server's hub."""

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined]  # set by `serve`

    def answer(self) -> None:
        path, posted = unquote(urlparse(self.path).path), self.received()
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if self.command == "PUT":
            return self.store(path.rpartition("/")[2], posted)
        if path == "/api/validate-yaml":
            assert json.loads(posted)["content"].startswith("---\n"), posted
            return self.reply({"errors": [], "warnings": []})
        if path == "/api/repos/create" or path.endswith(("/preupload/main", "/objects/batch", "/commit/main")):
            return self.write(path, posted)
        for name, folder in self.hub.datasets.items():
            for kind, files in (("datasets", "/datasets"), ("models", "")):
                if path.startswith(f"/api/{kind}/{name}"):
                    return self.describe(path.removeprefix(f"/api/{kind}/{name}"), name, folder, posted)
                if path.startswith(f"{files}/{name}/resolve/"):
                    return self.file(folder / path.removeprefix(f"{files}/{name}/resolve/").partition("/")[2])
        return self.send_content(b'{"error": "Repository not found"}', 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET = do_POST = do_PUT = answer

    def store(self, name: str, data: bytes) -> None:
        if not self.hub.before_upload(len(data)):
            return self.reply({"error": "Out of order"}, 400)
        assert hashlib.sha256(data).hexdigest() == name
        self.hub.objects[name] = data
        return self.reply({})

    def write(self, path: str, posted: bytes) -> None:
        """Handle requests that need the right to write: creating a dataset, and the three steps of an upload."""
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            return self.create(json.loads(posted))
        name, folder = next((name, folder) for name, folder in self.hub.datasets.items() if f"/{name}" in path)
        if path.endswith("/preupload/main"):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": oid(folder / file["path"]),
                }
                for file in json.loads(posted)["files"]
            ]
            return self.reply({"files": files})
        if path.endswith("/objects/batch"):
            objects = json.loads(posted)["objects"]
            for entry in objects:
                if entry["oid"] not in self.hub.objects:
                    entry["actions"] = {"upload": {"href": f"{self.hub.url}/objects/{entry['oid']}"}}
            return self.reply({"transfer": "basic", "objects": objects})
        committed = []
        for line in map(json.loads, posted.splitlines()):
            if line["key"] in ("file", "lfsFile"):
                file, large = line["value"], line["key"] == "lfsFile"
                content = self.hub.objects[file["oid"]] if large else base64.b64decode(file["content"])
                (folder / file["path"]).write_bytes(content)
                committed.append(file["path"])
        self.hub.commits.append(sorted(committed))
        return self.reply({"commitUrl": f"{self.hub.url}/datasets/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def create(self, repo: dict[str, str]) -> None:
        name, kind = f"{repo['organization']}/{repo['name']}", "datasets/" * (repo.get("type") == "dataset")
        if repo["organization"] != OWNER:
            message = f'You don\'t have the rights to create a dataset under the namespace "{name}"'
            return self.reply({"error": message}, 403)
        status = 409 if name in self.hub.datasets else 200
        if status == 200:
            assert self.hub.new is not None
            self.hub.datasets[name] = self.hub.new / name
            self.hub.datasets[name].mkdir(parents=True)
            self.hub.private |= {name} if repo.get("visibility") == "private" else set()
        return self.reply({"url": f"{self.hub.url}/{kind}{name}"}, status)

    def describe(self, rest: str, name: str, folder: Path, posted: bytes) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        entries = [
            {"type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": etag(path)}
            for path in files
        ]
        if rest.startswith("/tree/"):
            under = rest.split("/", 3)[3] if rest.count("/") > 2 else ""
            return self.reply(tree(entries, under, recursive="recursive=true" in self.path.lower()))
        if rest.startswith("/paths-info/"):
            paths = json.loads(posted).get("paths", []) if posted.startswith(b"{") else []
            return self.reply([entry for entry in entries if entry["path"] in paths])
        siblings: list[dict[str, object]] = [{"rfilename": entry["path"]} for entry in entries]
        for path, sibling in zip(files, siblings, strict=True):
            if "blobs" in self.path and path.name.endswith(LARGE):
                sibling["lfs"] = {"sha256": oid(path), "size": path.stat().st_size, "pointerSize": 134}
        commit = COMMIT if rest in ("", "/revision/main") else rest.removeprefix("/revision/")
        info = {"id": name, "sha": commit, "siblings": siblings, "private": name in self.hub.private}
        return self.reply(info | {"tags": [], "downloads": 0})

    def file(self, path: Path) -> None:
        if not path.is_file():
            return self.send_content(b"", 404, {"X-Error-Code": "EntryNotFound"})
        part, status, headers = self.requested_part(path.read_bytes())
        headers |= {"ETag": f'"{etag(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        cut = self.hub.cut_after_bytes
        if self.command == "HEAD" or cut is None or len(part) <= cut:
            return self.send_content(part, status, headers)
        self.hub.cut_after_bytes = None
        return self.send_content(part, status, headers, sent=cut)

    def reply(self, values: object, status: int = 200) -> None:
        self.send_content(json.dumps(values).encode(), status)


@contextmanager
def serve(datasets: dict[str, Path]) -> Iterator[Hub]:
    """Serve the datasets while the context lasts."""
    hub = Hub(datasets)
    with serving(Handler) as server:
        server.hub = hub  # type: ignore[attr-defined]
        hub.url = server.url
        yield hub


def tree(entries: list[dict[str, object]], under: str, *, recursive: bool) -> list[dict[str, object]]:
    """Return all files below a folder if `recursive`; otherwise, the files and folders directly in it."""
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


def oid(path: Path) -> str | None:
    """Return a file's object id, which the hub tells a client so that it need not upload the same file again."""
    if not path.is_file():
        return None
    data = path.read_bytes()
    if path.name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # git's id of a blob


def environment(hub: Hub, token: str | None = TOKEN) -> dict[str, str]:
    cache = str(hub.new)
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": cache, "HF_HUB_DISABLE_XET": "1"}
    return variables | ({"HF_TOKEN": token} if token else {})
