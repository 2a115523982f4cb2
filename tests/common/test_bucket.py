"""The bucket client against a real S3 server: conditional writes, large objects, AWS profiles, one-line errors."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from common import bucket as bucket_module
from common.bucket import PIECE_BYTES, Bucket, VersionConflict, store_of
from common.errors import BadInput
from common.files import is_bucket
from common.remote_files import look_up_remote, read_web_file
from tests import endless_server as endless
from tests.bucket_server import KEY, SECRET, BucketServer
from tests.loopback import QuietHandler, serving


@pytest.mark.usefixtures("bucket_server")
def test_conditional_writes_replace_only_the_given_version() -> None:
    bucket = Bucket("s3://runs/versions")
    assert bucket.read("claim") is None
    first = bucket.replace("claim", b"1", None)
    with pytest.raises(VersionConflict, match="s3://runs/versions/claim: another process has written it"):
        bucket.replace("claim", b"2", None)
    second = bucket.replace("claim", b"2", first)
    with pytest.raises(VersionConflict):
        bucket.replace("claim", b"3", first)
    assert bucket.read("claim") == second
    assert bucket.replace("claim", b"2", first) == second  # as if the answer to a first attempt had been lost
    bucket.delete(["claim", "never there"])
    with pytest.raises(VersionConflict):
        bucket.replace("claim", b"4", second)


@pytest.mark.usefixtures("bucket_server")
def test_files_in_several_pieces_are_unchanged(tmp_path: Path) -> None:
    content = os.urandom(2 * PIECE_BYTES + 12345)
    (tmp_path / "file").write_bytes(content)
    bucket = Bucket("s3://runs/large")
    with (tmp_path / "file").open("rb") as file:
        bucket.upload("a/file", file)
    assert bucket.objects() == bucket.objects("a")
    assert {name: entry.size_bytes for name, entry in bucket.objects().items()} == {"a/file": len(content)}
    assert b"".join(piece for _, piece in bucket.pieces("a/file", len(content))) == content
    assert [offset for offset, _ in bucket.pieces("a/file", len(content))] == [0, PIECE_BYTES, 2 * PIECE_BYTES]


def test_failed_requests_are_reported_in_one_line(bucket_server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "RETRY_SECONDS", 0.2)
    bucket_server.refusal = lambda _: 503
    with pytest.raises(BadInput, match=r"s3://runs/x/a: cannot be written: Refused: by the test$"):
        Bucket("s3://runs/x").write("a", b"")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(BadInput, match=r"s3://runs/x: cannot be listed: .*; check the network and the credentials$"):
        Bucket("s3://runs/x").objects()


def test_failed_requests_are_retried(bucket_server: BucketServer) -> None:
    bucket_server.refusal = lambda _: 503 if len(bucket_server.requests) == 1 else None
    Bucket("s3://runs/again").write("a", b"1")
    assert len(bucket_server.requests) == 2


def test_damaged_uploads_are_retried(
    bucket_server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "PIECE_BYTES", 5 << 20)  # S3's minimum
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", "true")  # the server would notice damage to a signed payload
    bucket = Bucket("s3://runs/damaged")
    for size in (20_000, 12_000_000):  # the first is uploaded in a single request, and the second in parts
        path, content = tmp_path / f"{size}.bin", os.urandom(size)
        path.write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        for damaged_uploads in (0, 1):
            bucket_server.calm()
            bucket_server.spoil = damaged_uploads
            bucket.upload_verified(path, sha256)
            assert bucket_server.spoil == 0
            assert damaged_uploads or not [request for request in bucket_server.requests if request.startswith("GET")]
            assert bucket.sha256(path.name) == sha256
        bucket_server.spoil = 100
        with pytest.raises(BadInput, match=rf"s3://runs/damaged/{path.name}: arrived damaged 3 times"):
            bucket.upload_verified(path, sha256)


def test_uploads_without_checksum_tags_are_read_back(
    bucket_server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(20))
    monkeypatch.setattr(bucket_module, "_checksum_tag", lambda _: "encrypted")
    Bucket("s3://runs/tags").upload_verified(tmp_path / "a.bin", hashlib.sha256(bytes(20)).hexdigest())
    assert any(request.startswith("GET /runs/tags/a.bin bytes=") for request in bucket_server.requests)


@pytest.mark.parametrize("profile", [None, "lab"])
def test_the_aws_profile_sets_keys_region_and_endpoint(
    bucket_server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str | None
) -> None:
    keys = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    where = f"region = us-east-1\nendpoint_url = {bucket_server.address}\n"
    sections = ("default", "default") if profile is None else (f"profile {profile}", profile)
    (tmp_path / ".aws").mkdir()
    for file, section, text in zip(("config", "credentials"), sections, (where, keys), strict=True):
        (tmp_path / ".aws" / file).write_text(f"[{section}]\n{text}[other]\naws_access_key_id = wrong\n")
    for name in bucket_server.environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    if profile is not None:
        monkeypatch.setenv("AWS_PROFILE", profile)
    Bucket("s3://runs/profile").write("a", b"1")
    assert Bucket("s3://runs/profile").read("a") is not None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(BadInput, match="InvalidAccessKeyId"):
        Bucket("s3://runs/profile").write("a", b"1")


@pytest.mark.parametrize(
    ("content", "profile", "message"),
    [
        (f"aws_secret_access_key = {SECRET}\n", "default", r"credentials: cannot be read as a file of AWS profiles"),
        ("[default]\n", "absent", "AWS_PROFILE: got absent, but ~/.aws/config and ~/.aws/credentials have no such"),
        ("[lab]\nrole_arn = a\n", "lab", "AWS profile lab: got role_arn, wanted access keys; run eval"),
    ],
)
def test_unusable_profiles_are_reported_without_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, profile: str, message: str
) -> None:
    (tmp_path / "credentials").write_text(content)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(BadInput, match=message) as refused:
        Bucket("s3://runs")
    assert SECRET not in str(refused.value)


def test_bucket_urls_contain_no_credentials() -> None:
    assert all(map(is_bucket, ("s3://bucket/prefix/of.it-1", "gs://bucket", "az://account/container/prefix")))
    secrets = ("s3://key:secret@bucket/prefix", "s3://bucket/prefix?key=secret")
    assert not any(map(is_bucket, (*secrets, "https://bucket/prefix", "s3://")))


PROVIDERS = (
    "karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip",
    "bucket.s3.amazonaws.com/a",
    "s3.amazonaws.com/bucket/a",
    "s3.us-west-2.amazonaws.com/bucket/a",
    "s3-us-west-2.amazonaws.com/bucket/a",
    "bucket.s3-eu-west-1.amazonaws.com/a",
    "bucket.s3.dualstack.eu-west-1.amazonaws.com/a",
    "bucket.s3-accelerate.amazonaws.com/a",
    "bucket.s3.cn-north-1.amazonaws.com.cn/a",
    "storage.googleapis.com/bucket/a",
    "bucket.storage.googleapis.com/a",
    "account.blob.core.windows.net/container/a",
    "account.dfs.core.windows.net/container/a",
    "account.blob.fabric.microsoft.com/workspace/a",
    "account.r2.cloudflarestorage.com/bucket/a",
    "huggingface.co/datasets/owner/name/resolve/main/a",
    "bucket.nyc3.digitaloceanspaces.com/a",
    "f000.backblazeb2.com/file/bucket/a",
    "bucket.s3.us-west-000.backblazeb2.com/a",
)
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIASECRET",
    "AWS_SECRET_ACCESS_KEY": "AWSSECRET",
    "AWS_SESSION_TOKEN": "TOKENSECRET",
    "GOOGLE_BEARER_TOKEN": "GOOGLESECRET",
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_ACCOUNT_KEY": "QVpVUkVTRUNSRVQ=",
    "HF_TOKEN": "hf_SECRET",
    "OPENAI_API_KEY": "sk-SECRET",
}


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process credentials for each provider, and a ~/.netrc that applies to every host."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\naws_access_key_id = AKIASECRET\n")
    (tmp_path / ".netrc").write_text("default login me password NETRCSECRET\n")
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("credentials")
def test_web_addresses_use_plain_http() -> None:
    from obstore.store import HTTPStore

    for address in PROVIDERS:
        for scheme in ("http", "https"):
            assert isinstance(store_of(f"{scheme}://{address}", {}), HTTPStore), address


@attrs.define
class Recorder:
    """A server that records the headers of each request. Used as a proxy, it answers for every host."""

    url: str = ""
    requests: list[tuple[str, dict[str, str]]] = attrs.field(factory=list)
    location: str | None = None  # the address to which each request is redirected

    @property
    def received(self) -> str:
        return repr(self.requests)


@contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()

    class Handler(QuietHandler):
        def answer(self) -> None:
            recorder.requests.append((self.path, dict(self.headers)))
            if recorder.location is not None:
                return self.send_content(b"", 302, {"Location": recorder.location})
            part, status, headers = self.requested_part(b"content")
            return self.send_content(part, status, {**headers, "ETag": '"1"'})

        do_HEAD = do_GET = answer

    with serving(Handler) as server:
        recorder.url = server.url
        yield recorder


@pytest.mark.usefixtures("credentials")
def test_environment_keys_are_not_sent_to_web_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    with recording() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        for address in PROVIDERS:
            assert read_web_file(f"http://{address}") == b"content"
        assert look_up_remote(f"http://{PROVIDERS[0]}").open().read() == b"content"
    assert {path for path, _ in proxy.requests} == {f"http://{address}" for address in PROVIDERS}
    harmless = {"accept", "user-agent", "host", "if-match", "range"}
    assert {name.lower() for _, headers in proxy.requests for name in headers} <= harmless
    assert "SECRET" not in proxy.received


@pytest.mark.usefixtures("credentials")
def test_redirects_do_not_leak_tokens() -> None:
    with recording() as first, recording() as second:
        first.location = f"{second.url}/final"
        bucket = Bucket(f"{first.url}/a", {"authorization": "Bearer hf_SECRET"})
        assert bucket.read_range("", 0, 7) == b"content"
    assert "hf_SECRET" in first.received and second.requests
    assert "SECRET" not in second.received


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_bucket_requests_are_signed_or_anonymous(scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bucket_module, "_has_metadata_service", lambda: False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [*os.environ]:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert store_of(f"{scheme}://bucket/a", {}).config.get("skip_signature") == "true"
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    assert "skip_signature" not in store_of(f"{scheme}://bucket/a", {}).config


def test_an_unknown_scheme_is_refused() -> None:
    for url in ("ftp://host/a", "file:///etc/passwd", "memory:///a", "s3a://bucket/a"):
        with pytest.raises(BadInput, match="unknown kind of URL; wanted s3://, gs://, az://, https:// or hf://"):
            Bucket(url)


def test_endless_web_replies_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(bucket_module, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(bucket_module, "SMALL_BYTES", 1000)
    for misbehaviour in (endless.dripped_headers, endless.dripped_body, endless.chunks, endless.redirects):
        with endless.serve(misbehaviour) as url, pytest.raises(BadInput, match="cannot be read"):
            Bucket(f"{url}/a").read("")
    with endless.serve(endless.large_body) as url, pytest.raises(BadInput, match="bytes, wanted at most 1,000"):
        Bucket(f"{url}/a").read("")


def test_a_key_listed_twice_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"path": "a", "e_tag": None, "version": None, "last_modified": datetime.now(timezone.utc)}
    entries = [same | {"size": size} for size in (1, 2)]
    bucket = Bucket("s3://runs/listed")
    monkeypatch.setattr(bucket, "_client", SimpleNamespace(list=lambda *_: iter([entries[:1], entries[1:]])))
    assert [(name, entry.size_bytes) for name, entry in bucket.objects().items()] == [("a", 2)]


@pytest.mark.parametrize(
    ("error_text", "beginning"),
    [
        ("Generic S3 error: " + "x" * 200, "the request failed; check the network and the credentials"),
        (
            "a\nb, operation timed out",
            "no complete answer within 60 seconds; check the network and the credentials (a",
        ),
        ("server returned status code: 403 Forbidden", "the server answered with status 403; check the network and"),
        ("Client error token=abcdefgh12345678", "the request failed; check the network and the credentials"),
    ],
)
def test_obstore_errors_are_readable(error_text: str, beginning: str) -> None:
    reason = bucket_module._reason(RuntimeError(error_text))
    assert reason.startswith(beginning)
    assert "abcdefgh" not in reason and len(reason) < 250 and "xxx" not in reason
