"""Bucket client against a real S3 server: conditional writes, large objects, errors as one line."""

import os
from pathlib import Path

import pytest

from common import bucket as bucket_module
from common.bucket import PIECE_BYTES, Bucket, Taken, is_bucket
from common.errors import BadInput
from tests.bucket_server import BucketServer


@pytest.mark.usefixtures("bucket_server")
def test_a_conditional_write_replaces_the_version_that_was_seen_and_no_other() -> None:
    bucket = Bucket("s3://runs/versions")
    assert bucket.read("claim") is None
    first = bucket.replace("claim", b"1", None)
    with pytest.raises(Taken, match="s3://runs/versions/claim: another process has written it"):
        bucket.replace("claim", b"2", None)
    second = bucket.replace("claim", b"2", first)
    with pytest.raises(Taken):
        bucket.replace("claim", b"3", first)
    assert bucket.read("claim") == second
    assert bucket.replace("claim", b"2", first) == second  # the answer to a first attempt was lost
    bucket.delete(["claim", "never there"])
    with pytest.raises(Taken):
        bucket.replace("claim", b"4", second)


@pytest.mark.usefixtures("bucket_server")
def test_a_file_of_several_pieces_arrives_and_returns_as_it_was(tmp_path: Path) -> None:
    content = os.urandom(2 * PIECE_BYTES + 12345)
    (tmp_path / "file").write_bytes(content)
    bucket = Bucket("s3://runs/large")
    with (tmp_path / "file").open("rb") as file:
        bucket.upload("a/file", file)
    assert bucket.sizes() == bucket.sizes("a") == {"a/file": len(content)}
    assert b"".join(piece for _, piece in bucket.pieces("a/file", len(content))) == content
    assert [offset for offset, _ in bucket.pieces("a/file", len(content))] == [0, PIECE_BYTES, 2 * PIECE_BYTES]


def test_a_request_that_fails_for_good_is_one_line(
    bucket_server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "RETRY_SECONDS", 0.2)
    bucket_server.refusal = lambda _: 503
    with pytest.raises(BadInput, match=r"s3://runs/x/a: cannot be written: Refused: by the test$"):
        Bucket("s3://runs/x").write("a", b"")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(BadInput, match=r"s3://runs/x: cannot be listed: .*; check network and credentials$"):
        Bucket("s3://runs/x").sizes()


def test_a_request_that_fails_once_is_tried_again(bucket_server: BucketServer) -> None:
    bucket_server.refusal = lambda _: 503 if len(bucket_server.requests) == 1 else None
    Bucket("s3://runs/again").write("a", b"1")
    assert len(bucket_server.requests) == 2


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("s3://bucket/prefix/of.it-1", True),
        ("gs://bucket", True),
        ("az://account/container/prefix", True),
        ("https://bucket/prefix", False),
        ("s3://key:secret@bucket/prefix", False),
        ("s3://bucket/prefix?key=secret", False),
        ("s3://", False),
    ],
)
def test_urls_of_buckets_have_no_credentials(url: str, wanted: bool) -> None:
    assert is_bucket(url) == wanted
