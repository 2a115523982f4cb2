"""Token files in a bucket are downloaded once. A stopped download resumes. A prefix without token files is refused."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from common import bucket as bucket_module
from common import files
from common.bucket import Bucket
from common.errors import BadInput
from tests.bucket_server import BucketServer
from tests.conftest import MakeRun, complete
from tests.training.checkpoints.conftest import IMPATIENT
from tests.walks import final_hash
from tokens.hub.download import INCOMPLETE, RECEIPT, download_dataset

NAMES = ("train.safetensors", "validation.safetensors", "manifest.json")


def put(prefix: str, folder: Path) -> str:
    """Upload token files to a prefix, and return its URL."""
    url = f"s3://runs/{prefix}"
    for name in NAMES:
        Bucket(url).write(name, (folder / name).read_bytes())
    Bucket(url).write("other/notes.txt", b"not a token file")
    return url


def test_a_download_resumes_and_is_not_repeated(
    bucket_server: BucketServer, token_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "RETRY_SECONDS", 0.2)
    url, here = put("tokens", token_files), tmp_path / "tokens"
    bucket_server.refusal = lambda request_line: (
        503 if request_line.startswith("GET") and "validation" in request_line else None
    )
    with pytest.raises(BadInput, match=r"tokens/validation.safetensors: cannot be read: Refused"):
        download_dataset(url, here)
    arrived = {"manifest.json", "train.safetensors", ".partial-validation.safetensors", INCOMPLETE}
    assert {path.name for path in here.iterdir()} == arrived
    bucket_server.calm()
    download_dataset(url, here)
    assert all((here / name).read_bytes() == (token_files / name).read_bytes() for name in NAMES)
    assert not any("train.safetensors" in request for request in bucket_server.requests)
    bucket_server.calm()
    download_dataset(url, here)
    assert bucket_server.requests == []


def test_a_download_never_mixes_two_preparations(
    bucket_server: BucketServer, token_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(bucket_module, "PIECE_BYTES", 1 << 17)
    monkeypatch.setattr(bucket_module, "PIECES_AT_ONCE", 1)
    url, here = put("mixed", token_files), tmp_path / "tokens"
    bucket = Bucket(url)
    second_preparation = {name: (token_files / name).read_bytes()[::-1] for name in NAMES}  # in the same sizes

    def replace(number: int) -> None:
        if "train" in bucket_server.requests[number - 1] and not bucket_server.requests[number - 1].startswith("PUT"):
            bucket_server.before = lambda _: None
            for name, content in second_preparation.items():
                bucket.write(name, content)

    bucket_server.before = replace
    with pytest.raises(
        BadInput, match=r"train.safetensors: was replaced while it was being read; rerun the same command"
    ):
        download_dataset(url, here)
    os.utime(here / "manifest.json", (0, 0))  # the local file is older than the new object
    download_dataset(url, here)
    assert {name: (here / name).read_bytes() for name in NAMES} == second_preparation
    (here / RECEIPT).unlink()
    (here / "train.safetensors").rename(here / "train-00000-of-00002.safetensors")
    with pytest.raises(
        BadInput, match=r"00002.safetensors: is not in s3://runs/mixed, so it belongs to another preparation"
    ):
        download_dataset(url, here)


@pytest.mark.usefixtures("bucket_server")
def test_a_download_replaces_no_user_file(token_files: Path, tmp_path: Path) -> None:
    url, here = put("careful", token_files), tmp_path / "tokens"
    here.mkdir()
    (here / "train.safetensors").write_bytes(b"tokens that the user has prepared")
    with pytest.raises(
        BadInput, match=r"train.safetensors: exists \(33 bytes\), and a different file with this name in s3://"
    ):
        download_dataset(url, here)
    assert [path.name for path in here.iterdir()] == ["train.safetensors"]
    assert (here / "train.safetensors").read_bytes() == b"tokens that the user has prepared"


@pytest.mark.usefixtures("bucket_server")
def test_missing_tokens_or_disk_space_is_one_error_line(
    token_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"dataset s3://runs/none: contains no token files; wanted train.safetensors"):
        download_dataset("s3://runs/none", tmp_path / "none")
    url = put("room", token_files)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(BadInput, match=r"dataset s3://runs/room: got 1 B free at .*; free some"):
        download_dataset(url, tmp_path / "room")


@pytest.mark.slow
def test_a_run_downloads_its_dataset_once_per_machine(
    make_run: MakeRun, bucket_server: BucketServer, token_files: Path, tmp_path: Path
) -> None:
    url = put("dataset", token_files)
    local, remote = make_run("local"), make_run("remote", dataset=url)
    environment = {"DOWNLOADS": str(tmp_path / "downloads")}
    bucket_server.calm()
    for run in (local, remote):
        complete(run, script=IMPATIENT, ranks=2, environment=environment)
    assert final_hash(local) == final_hash(remote)
    fetched = [request for request in bucket_server.requests if "train.safetensors" in request]
    assert len(fetched) == 1
    shutil.rmtree(remote / "checkpoints")
    complete(remote, script=IMPATIENT, environment=environment)
    assert len([request for request in bucket_server.requests if "train.safetensors" in request]) == 1
