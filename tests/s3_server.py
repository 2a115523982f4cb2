"""A real S3 server on loopback, moto's, that can be made to fail now and then."""

import io
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

BUCKET = "texts"


@attrs.define
class S3Server:
    """A server with one bucket, and its ailments."""

    url: str = ""
    requests: list[str] = attrs.field(factory=list)
    busy_every: int = 0  # this many reads and writes; 0: never
    drop_every: int = 0  # the connection, after half of what was asked for
    spoil: int = 0  # so many of the next uploads, by a bit

    def environment(self) -> dict[str, str]:
        """Return what a user sets for a server that is not Amazon's."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self) -> Any:
        import boto3

        return boto3.client("s3", self.environment()["AWS_DEFAULT_REGION"], endpoint_url=self.url, **KEYS)

    def put(self, name: str, data: bytes) -> None:
        self.client().put_object(Bucket=BUCKET, Key=name, Body=data)

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Return the content of all objects whose names begin so, by the rest of their names."""
        client = self.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        names = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {name.removeprefix(prefix): client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}


KEYS = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}


@contextmanager
def serve_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Serve an empty bucket while the context lasts, known to this process and its children as users set it up."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: object) -> None:
            pass

    s3 = S3Server()
    moto = server_module.DomainDispatcherApplication(server_module.create_backend_app)
    server = make_server("127.0.0.1", 0, _ailing(moto, s3), threaded=True, request_handler=Quiet)
    s3.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urllib.request.urlopen(f"{s3.url}/moto-api/reset", data=b"")  # its memory is the process's
    s3.client().create_bucket(Bucket=BUCKET)
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    _forget_servers()
    try:
        yield s3
    finally:
        _forget_servers()
        server.shutdown()
        server.server_close()


def _ailing(app: Callable[..., Iterable[bytes]], s3: S3Server) -> Callable[..., Iterable[bytes]]:
    """Return an application that answers as `app` does, but for the server's ailments."""
    transfers = 0

    def half(body: bytes) -> Iterator[bytes]:
        yield body[: len(body) // 2]
        raise ConnectionResetError("dropped")

    def answer(environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        nonlocal transfers
        asked = f"{environment['REQUEST_METHOD']} {environment['PATH_INFO']} {environment.get('HTTP_RANGE', '')}"
        s3.requests.append(asked.strip())
        method = environment["REQUEST_METHOD"]
        if method == "PUT":
            data = bytearray(environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0)))
            if s3.spoil:
                s3.spoil -= 1
                data[len(data) // 2] ^= 1
            environment["wsgi.input"] = io.BytesIO(bytes(data))
        elif method != "GET" or "HTTP_RANGE" not in environment:
            return app(environment, start)
        transfers += 1
        if s3.busy_every and transfers % s3.busy_every == 0:
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]
        if method == "PUT" or not s3.drop_every or transfers % s3.drop_every:
            return app(environment, start)
        return half(b"".join(app(environment, start)))

    return answer


def _forget_servers() -> None:
    """Make fsspec connect anew: the next server has another port."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
