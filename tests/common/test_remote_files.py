"""Remote files have the same bytes as local ones; failed requests are retried, or reported in one line."""

import gzip
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from common import bucket as bucket_module
from common import remote_files as remote
from common.bucket import Bucket, StoredObject
from common.errors import BadInput
from tests.bucket_server import BucketServer
from tests.loopback import FileServer, serve_files
from tests.tokens.preparing import PREPARE, PYTHONPATH, files_of, jsonl, run, succeed, write
from tokens.documents.sources import resolve_sources

OPTIONS = ("--tokenizer", "bytes", "--unit-bytes", "50000", "--workers", "1", "--validation-fraction", "0.1")
TEXTS = "s3://runs/texts"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents in each format, some of them in a subfolder, and a file that must be ignored."""
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
    """The token files that are prepared from the corpus on the local disk."""
    directory = tmp_path_factory.mktemp("local")
    succeed(PREPARE, corpus, "--output", directory, *OPTIONS)
    return files_of(directory)


@pytest.fixture
def texts(corpus: Path, bucket_server: BucketServer) -> Bucket:
    """A bucket that contains the corpus below the prefix TEXTS."""
    bucket = Bucket(TEXTS)
    for path in corpus.rglob("*.*"):
        bucket.write(str(path.relative_to(corpus)), path.read_bytes())
    bucket_server.calm()
    return bucket


@pytest.fixture
def web(corpus: Path) -> Iterator[FileServer]:
    with serve_files(corpus) as server:
        yield server


def paths(name: str) -> list[str]:
    return [item.path for source in resolve_sources([name]) for item in source.inputs]


@pytest.mark.slow
@pytest.mark.usefixtures("texts")
def test_bucket_files_are_read_despite_temporary_failures(
    bucket_server: BucketServer, local: dict[str, str], tmp_path: Path
) -> None:
    bucket_server.refusal = lambda _: 503 if len(bucket_server.requests) % 5 == 0 else None
    bucket_server.drop_every = 7
    succeed(PREPARE, TEXTS, "--output", tmp_path / "out", *OPTIONS)
    assert files_of(tmp_path / "out") == local
    assert sum(request.startswith("GET") and "bytes=" in request for request in bucket_server.requests) > 14
    bucket_server.calm()
    succeed(PREPARE, "verify", tmp_path / "out")


def test_web_files_are_read_despite_temporary_failures(web: FileServer, local: dict[str, str], tmp_path: Path) -> None:
    web.busy_every, web.drop_every = 5, 7
    succeed(PREPARE, f"{web.url}/", "--output", tmp_path / "out", *OPTIONS)
    assert files_of(tmp_path / "out") == local


def test_a_url_names_a_file_a_folder_or_a_glob(texts: Bucket, web: FileServer) -> None:
    Bucket("s3://runs/odd").write("[1] a?.txt", b"a document")
    for root in (texts.url, web.url):
        everything = [f"{root}/{name}" for name in ("a.parquet", "b.jsonl", "d.txt", "deeper/c.jsonl.gz")]
        assert paths(f"{root}/") == everything
        assert paths(f"{root}/*.jsonl") == everything[1:2]
        assert paths(f"{root}/[!ab].t?t") == everything[2:3]
        assert paths(f"{root}/**/*.gz") == everything[3:]
        assert paths(f"{root}/d.txt") == everything[2:3]
        with pytest.raises(BadInput, match=r"notes\.bin: contains token ids, not documents"):
            paths(f"{root}/notes.bin")
    assert paths("s3://runs/odd/[1] a?.txt") == ["s3://runs/odd/[1] a?.txt"]
    assert len(paths("s3://runs/texts")) == 4
    with pytest.raises(BadInput, match=r"ftp://a/b\.txt: unknown kind of URL; wanted s3://"):
        paths("ftp://a/b.txt")


def test_a_file_is_found_without_reading_it(web: FileServer) -> None:
    paths(f"{web.url}/d.txt")
    assert web.requests == ["HEAD /d.txt"]


def test_stamps_match_earlier_plans() -> None:
    entry = StoredObject(size_bytes=3, written_at=1795631619.0, e_tag='"0x8D"', version=None)
    dated = StoredObject(size_bytes=3, written_at=1795631619.0, e_tag=None, version=None)
    google = StoredObject(size_bytes=3, written_at=0.0, e_tag='"a"', version="1418688703353000")
    for url, stored, stamp in (
        ("s3://a/b", entry, "ETag 0x8D"),
        ("az://a/b", entry, "etag 0x8D"),
        ("https://a/b", dated, "Last-Modified Wed, 25 Nov 2026 18:33:39 GMT"),
        ("gs://a/b", google, "etag CKih16GjycICEAE="),
    ):
        assert remote._remote_file(url, stored).stamp == stamp


@pytest.mark.parametrize("kind", ["b.jsonl", "a.parquet", "d.txt", "deeper/c.jsonl.gz"])
def test_changed_and_missing_objects_are_named(texts: Bucket, corpus: Path, tmp_path: Path, kind: str) -> None:
    url = f"{texts.url}/{kind}"
    [source] = resolve_sources([url])
    with source.inputs[0].open() as stream:
        assert stream.read(10) == (corpus / kind).read_bytes()[:10]
    write(tmp_path / "done", url)  # type: ignore[arg-type]
    texts.write(kind, (corpus / kind).read_bytes() + b"\n")
    with pytest.raises(BadInput, match=f"{url}: has changed since this preparation started; restore"):
        source.inputs[0].open()
    with pytest.raises(BadInput, match=f"{url}: has changed since this preparation started; restore"):
        write(tmp_path / "done", url)  # type: ignore[arg-type]
    texts.delete([kind])
    with pytest.raises(BadInput, match=f"{url}: cannot be read: not found; restore it, then rerun the same command"):
        source.inputs[0].open()


def read_gzip(stream: Any) -> None:
    gzip.GzipFile(fileobj=stream).read()


@pytest.mark.parametrize(
    ("kind", "read"), [("a.parquet", pyarrow.parquet.read_table), ("deeper/c.jsonl.gz", read_gzip)]
)
def test_an_object_replaced_during_reading_is_not_damaged(
    texts: Bucket, monkeypatch: pytest.MonkeyPatch, kind: str, read: Callable[[Any], object]
) -> None:
    monkeypatch.setattr(remote, "READ_AHEAD_BYTES", 1 << 10)
    url = f"{texts.url}/{kind}"
    [source] = resolve_sources([url])
    with source.inputs[0].open() as stream:
        stream.read(10)
        texts.write(kind, texts.read(kind).content[::-1])
        stream.seek(0)
        with pytest.raises(BadInput, match=f"{url}: was replaced while it was being read"):
            read(stream)


@pytest.mark.slow
@pytest.mark.usefixtures("bucket_server")
def test_missing_servers_and_packages_are_reported_in_one_line(
    tmp_path: Path, web: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "RETRY_SECONDS", 0.1)
    with pytest.raises(
        BadInput, match=r"http://127.0.0.1:9/a.txt: cannot be read: .*; check the network and the credentials"
    ):
        paths("http://127.0.0.1:9/a.txt")
    web.ranges = False
    no_ranges = run(PREPARE, f"{web.url}/b.jsonl", "--output", tmp_path / "d", *OPTIONS)
    (tmp_path / "obstore.py").write_text("raise ImportError('not here')")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), PYTHONPATH])}
    missing = [run(PREPARE, url, "--output", tmp_path / "c", *OPTIONS, **environment) for url in ("s3://a/b", web.url)]
    for done, message in (
        (no_ranges, f"{web.url}/b.jsonl: cannot be read: the server sends only whole files, not ranges; download the"),
        (missing[0], "s3://a: needs obstore: pip install obstore"),
        (missing[1], f"{web.url}: needs obstore: pip install obstore"),
    ):
        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1], done.stderr
        assert "Traceback" not in done.stderr
