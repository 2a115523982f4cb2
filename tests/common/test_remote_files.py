"""Remote files give the same bytes as local ones; servers that fail are retried, or named in one line."""

import gzip
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from common import remote_files as remote
from common.errors import BadInput
from tests.file_server import FileServer, serve_files
from tests.s3_server import BUCKET, S3Server, serve_s3
from tests.tokens.preparing import PREPARE, PYTHONPATH, files_of, jsonl, run, write
from tokens.documents.sources import resolve_sources

OPTIONS = ("--tokenizer", "bytes", "--unit-bytes", "50000", "--workers", "1", "--validation-fraction", "0.1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A document or more in every format, in folders, beside what is none."""
    folder = tmp_path_factory.mktemp("remote") / "texts"
    (folder / "deeper").mkdir(parents=True)
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcd efg", k=draw.choice([3, 300]))) for _ in range(1000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet", row_group_size=100)
    jsonl(folder / "b.jsonl", texts)
    (folder / "deeper" / "c.jsonl.gz").write_bytes(gzip.compress((folder / "b.jsonl").read_bytes(), mtime=0))
    (folder / "d.txt").write_text(" ".join(texts))
    (folder / "notes.bin").write_bytes(b"\0")
    return folder


@pytest.fixture(scope="module")
def local(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The token files of the corpus as it lies on the disk."""
    directory = tmp_path_factory.mktemp("local")
    done = run(PREPARE, corpus, "--output", directory, *OPTIONS)
    assert done.returncode == 0, done.stderr
    return files_of(directory)


@pytest.fixture
def s3(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server that holds the corpus."""
    with serve_s3(monkeypatch) as server:
        for path in corpus.rglob("*.*"):
            server.put(f"some/{path.relative_to(corpus)}", path.read_bytes())
        yield server


@pytest.fixture
def web(corpus: Path) -> Iterator[FileServer]:
    with serve_files(corpus) as server:
        yield server


def paths(name: str) -> list[str]:
    return [item.path for source in resolve_sources([name]) for item in source.inputs]


@pytest.mark.slow
def test_a_bucket_gives_the_bytes_of_the_disk_even_when_it_fails_now_and_then(
    s3: S3Server, local: dict[str, str], tmp_path: Path
) -> None:
    s3.busy_every, s3.drop_every = 5, 7
    done = run(PREPARE, f"s3://{BUCKET}/some", "--output", tmp_path / "out", *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "out") == local
    assert len([request for request in s3.requests if request.startswith("GET") and "bytes=" in request]) > 14
    assert run(PREPARE, "verify", tmp_path / "out").returncode == 0


def test_a_web_server_gives_the_bytes_of_the_disk_even_when_it_fails_now_and_then(
    web: FileServer, local: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp")
    web.busy_every, web.drop_every = 5, 7
    done = run(PREPARE, f"{web.url}/", "--output", tmp_path / "out", *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "out") == local


def test_a_url_names_a_file_a_folder_or_a_glob(s3: S3Server, web: FileServer) -> None:
    pytest.importorskip("aiohttp")
    s3.put("odd/[1] a?.txt", b"a document")
    for root in (f"s3://{BUCKET}/some", web.url):
        everything = [f"{root}/{name}" for name in ("a.parquet", "b.jsonl", "d.txt", "deeper/c.jsonl.gz")]
        assert paths(f"{root}/") == everything
        assert paths(f"{root}/*.jsonl") == everything[1:2]
        assert paths(f"{root}/**/*.gz") == everything[3:]
        assert paths(f"{root}/d.txt") == everything[2:3]
        with pytest.raises(BadInput, match=r"notes\.bin: unknown kind of document"):
            paths(f"{root}/notes.bin")
    assert paths(f"s3://{BUCKET}/odd/[1] a?.txt") == [f"s3://{BUCKET}/odd/[1] a?.txt"]
    assert len(paths(f"s3://{BUCKET}")) == 5


def test_a_file_is_found_without_reading_it(web: FileServer) -> None:
    pytest.importorskip("aiohttp")
    paths(f"{web.url}/d.txt")
    assert web.requests == ["HEAD /d.txt"] * 2  # to find it, and to know it


@pytest.mark.parametrize("kind", ["b.jsonl", "a.parquet", "d.txt", "deeper/c.jsonl.gz"])
def test_an_object_that_changed_or_vanished_is_refused_by_name(
    s3: S3Server, corpus: Path, tmp_path: Path, kind: str
) -> None:
    url = f"s3://{BUCKET}/some/{kind}"
    [source] = resolve_sources([url])
    with source.inputs[0].open() as stream:
        assert stream.read(10) == (corpus / kind).read_bytes()[:10]
    write(tmp_path / "done", url)  # type: ignore[arg-type]
    s3.put(f"some/{kind}", (corpus / kind).read_bytes() + b"\n")
    with pytest.raises(BadInput, match=f"{url}: changed since these tokens were begun: got .* bytes of ETag"):
        source.inputs[0].open()
    with pytest.raises(BadInput, match=f"{url}: changed since these tokens were begun: got .* bytes of ETag"):
        write(tmp_path / "done", url)  # type: ignore[arg-type]
    s3.client().delete_object(Bucket=BUCKET, Key=f"some/{kind}")
    with pytest.raises(BadInput, match=f"{url}: cannot be read: not found; the same command goes on"):
        source.inputs[0].open()


def test_an_object_that_changes_while_it_is_read_is_not_taken_for_a_damaged_one(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(remote, "BUFFER_BYTES", 1 << 10)
    read = remote._RemoteFile._read
    for kind in ("a.parquet", "deeper/c.jsonl.gz"):
        url = f"s3://{BUCKET}/some/{kind}"
        [source] = resolve_sources([url])
        others = [s3.objects("some/")[kind][::-1]]

        def change(file: Any, count: int, name: str = kind, others: list[bytes] = others) -> bytes:
            if others and 0 < file._position < 200_000:
                s3.put(f"some/{name}", others.pop())
            return read(file, count)

        with source.inputs[0].open() as stream:
            stream.read(10)
            stream.seek(0)
            monkeypatch.setattr(remote._RemoteFile, "_read", change)
            with pytest.raises(BadInput, match=f"{url}: cannot be read: .* no longer exists"):
                read_all(kind, stream)
        monkeypatch.setattr(remote._RemoteFile, "_read", read)


def read_all(kind: str, stream: Any) -> None:
    if kind.endswith(".gz"):
        gzip.GzipFile(fileobj=stream).read()
    else:
        pyarrow.parquet.read_table(stream)


@pytest.mark.slow
def test_a_server_that_is_not_there_and_a_package_that_is_missing_are_one_line(
    tmp_path: Path, s3: S3Server, web: FileServer
) -> None:
    environment = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    nowhere = run(PREPARE, f"s3://{BUCKET}/some", "--output", tmp_path / "a", *OPTIONS, **environment)
    closed = run(PREPARE, "http://127.0.0.1:9/a.txt", "--output", tmp_path / "b", *OPTIONS)
    web.ranges = False
    whole = run(PREPARE, f"{web.url}/b.jsonl", "--output", tmp_path / "d", *OPTIONS)
    for name in ("s3fs", "aiohttp"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    without = {"PYTHONPATH": os.pathsep.join([str(tmp_path), PYTHONPATH])}
    missing = [run(PREPARE, url, "--output", tmp_path / "c", *OPTIONS, **without) for url in ("s3://a/b", web.url)]
    for done, said in (
        (nowhere, f"s3://{BUCKET}/some: cannot be read: Could not connect to the endpoint URL"),
        (closed, "http://127.0.0.1:9/a.txt: cannot be read: Cannot connect to host 127.0.0.1:9"),
        (whole, f"{web.url}/b.jsonl: cannot be read: The HTTP server doesn't appear to support range requests"),
        (missing[0], "s3://a/b: Install s3fs to access S3: pip install it"),
        (missing[1], 'aiohttp" to be installed: pip install it'),
    ):
        assert done.returncode == 1
        assert said in done.stderr.splitlines()[-1], done.stderr
        assert "Traceback" not in done.stderr
