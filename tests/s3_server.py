"""A real S3 server on loopback, moto's, that can be made to fail now and then."""

import threading
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
    busy_every: int = 0  # this many reads; 0: never
    drop_every: int = 0  # the connection, after half of what was asked for

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
def serve_s3() -> Iterator[S3Server]:
    """Serve an empty bucket while the context lasts."""
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
    s3.client().create_bucket(Bucket=BUCKET)
    try:
        yield s3
    finally:
        server.shutdown()
        server.server_close()


def _ailing(app: Callable[..., Iterable[bytes]], s3: S3Server) -> Callable[..., Iterable[bytes]]:
    """Return an application that answers as `app` does, but for the server's ailments."""
    reads = 0

    def half(body: bytes) -> Iterator[bytes]:
        yield body[: len(body) // 2]
        raise ConnectionResetError("dropped")

    def answer(environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        nonlocal reads
        asked = f"{environment['REQUEST_METHOD']} {environment['PATH_INFO']} {environment.get('HTTP_RANGE', '')}"
        s3.requests.append(asked.strip())
        if environment["REQUEST_METHOD"] != "GET" or "HTTP_RANGE" not in environment:
            return app(environment, start)
        reads += 1
        if s3.busy_every and reads % s3.busy_every == 0:
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]
        body = app(environment, start)
        return half(b"".join(body)) if s3.drop_every and reads % s3.drop_every == 0 else body

    return answer
