"""Bucket folder: objects are known to have arrived whole."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common import bucket_folder
from common.bucket_folder import BucketFolder
from common.errors import BadInput
from tests.s3_server import BUCKET, S3Server, serve_s3


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with serve_s3(monkeypatch) as server:
        yield server


def upload(folder: BucketFolder, path: Path) -> None:
    folder.upload(path, hashlib.sha256(path.read_bytes()).hexdigest())


def test_an_upload_that_arrives_damaged_is_repeated(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_folder, "PART_BYTES", 5 << 20)  # S3's least
    folder = BucketFolder(f"s3://{BUCKET}/out")
    for size in (20_000, 12_000_000):  # at once, and in parts
        path = tmp_path / f"{size:08d}.bin"
        path.write_bytes(np.arange(size // 2, dtype=np.uint16).tobytes())
        upload(folder, path)
        assert not [request for request in s3.requests if request.startswith("GET") and path.name in request]
        s3.spoil = 1
        upload(folder, path)
        assert s3.spoil == 0
        assert s3.objects(f"out/{path.name}")[""] == path.read_bytes()
        s3.spoil = 100
        with pytest.raises(BadInput, match=f"s3://{BUCKET}/out/{path.name}: arrived damaged 3 times"):
            upload(folder, path)
        s3.spoil = 0


def test_a_server_whose_tags_are_no_checksums_is_read_back(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(20))
    monkeypatch.setattr(bucket_folder, "_tag", lambda _: "encrypted")
    upload(BucketFolder(f"s3://{BUCKET}/out"), path)
    assert any(request.startswith(f"GET /{BUCKET}/out/{path.name} bytes=") for request in s3.requests)


def test_an_object_that_is_there_is_not_created_again(s3: S3Server) -> None:
    folder = BucketFolder(f"s3://{BUCKET}/out")
    folder.create("a", b"first", "in use")
    folder.create("a", b"first", "in use")  # the answer to an earlier attempt may have been lost
    with pytest.raises(BadInput, match=f"s3://{BUCKET}/out/a: exists: in use"):
        folder.create("a", b"second", "in use")
    assert folder.read("a") == b"first"
    assert folder.names() == ["a"]
