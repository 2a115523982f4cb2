"""Datasets of the hub are downloaded by the real client libraries from a real server on loopback."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import save_file

from common.errors import BadInput
from tests import hub_server
from tests.conftest import ROOT, MakeRun, complete, metrics
from tests.hub_server import serve
from tests.tokens.format.token_directory import write_llm_c
from tests.tokens.preparing import PREPARE, run, texts_of
from tokens.format.manifest import has_split
from tokens.format.token_file import open_split
from tokens.hub import download as hub


def own(url: str, cache: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}


def download(
    url: str, directory: Path, cache: Path, train_tokens: int | None = None
) -> "subprocess.CompletedProcess[str]":
    """Download in a separate process, because the client libraries read their settings when they are imported."""
    code = (
        "import sys; from pathlib import Path; from common.errors import BadInput\n"
        "from tokens.hub.download import download_dataset\n"
        f"try: download_dataset('owner/tokens', Path({str(directory)!r}), {train_tokens})\n"
        "except BadInput as error: sys.exit(str(error))"
    )
    return run([sys.executable, "-c", code], **own(url, cache))


def test_token_files_are_downloaded_once_and_resumed(tmp_path: Path) -> None:
    token_files, directory, cache = tmp_path / "published", tmp_path / "downloaded", tmp_path / "cache"
    token_files.mkdir()
    for split, length in (("train", 12_000_000), ("validation", 1000)):
        save_file({"tokens": np.arange(length, dtype=np.uint16)}, token_files / f"{split}.safetensors")
    with serve({"owner/tokens": token_files}) as server:
        server.cut_after_bytes = 20_000_000  # the client keeps received data in pieces of 10 MiB
        assert download(server.url, directory, cache).returncode == 0
        assert hub.is_complete(directory)
        # The download continued where it was interrupted.
        assert any("train.safetensors bytes=" in line for line in server.requests)
        for split in ("train", "validation"):
            assert open_split(directory, split).length == open_split(token_files, split).length
            name = f"{split}.safetensors"
            assert (directory / name).read_bytes() == (token_files / name).read_bytes()
        before = len(server.requests)
        assert download(server.url, directory, cache).returncode == 0
        assert len(server.requests) == before


def test_a_hub_download_replaces_no_user_file(tmp_path: Path) -> None:
    token_files, directory, cache = tmp_path / "published", tmp_path / "downloaded", tmp_path / "cache"
    token_files.mkdir()
    directory.mkdir()
    save_file({"tokens": np.arange(100, dtype=np.uint16)}, token_files / "train.safetensors")
    (token_files / "manifest.json").write_text("{}")
    (directory / "manifest.json").write_text('{"of": "the user"}')
    with serve({"owner/tokens": token_files}) as server:
        done = download(server.url, directory, cache)
        assert (
            done.returncode != 0
            and "manifest.json: exists (18 bytes), and a different file with this name" in done.stderr
        )
        assert (directory / "manifest.json").read_text() == '{"of": "the user"}'
        (directory / "manifest.json").unlink()
        assert download(server.url, directory, cache).returncode == 0


@pytest.fixture
def shards(token_files: Path, tmp_path: Path) -> Path:
    """A hub dataset in llm.c's format: 5 train shards of 400 tokens each, and a validation shard of 2,000 tokens."""
    directory = tmp_path / "shards"
    directory.mkdir()
    for split, word, size, count in (("train", "train", 400, 5), ("validation", "val", 2000, 1)):
        stream = open_split(token_files, split)
        for number in range(count):
            write_llm_c(directory / f"tiny_{word}_{number:06d}.bin", stream.read(number * size, size))
    (directory / "README.md").write_text("shards")
    return directory


@pytest.mark.slow
def test_a_run_downloads_only_the_shards_it_reads(make_run: MakeRun, shards: Path, tmp_path: Path) -> None:
    name = "lockstep-test-shards/tokens"
    target = ROOT / "token_files" / name
    shutil.rmtree(target.parent, ignore_errors=True)
    fixed = {"global_batch_size": 4, "validation_sequences": 8, "checkpoint_interval": 2, "warmup_period_percent": 0}
    short, longer, mixed, local = (
        make_run(run, dataset=dataset, min_train_tokens=tokens, shuffle=run == "mixed", **fixed)
        for run, dataset, tokens in (
            ("short", name, 4 * 128),
            ("longer", name, 10 * 128),
            ("mixed", name, 4 * 128),
            ("local", str(shards), 4 * 128),
        )
    )

    def fetched() -> list[str]:
        return sorted({line.split("/")[-1].split()[0] for line in server.requests if line.startswith("GET /datasets")})

    def trained(directory: Path, *options: str) -> str:
        done = complete(directory, "--hash-every", "1", *options, environment=environment)
        return str(done.stdout)

    try:
        with serve({name: shards}) as server:
            environment = own(server.url, tmp_path / "cache")
            trained(short, "--max-steps", "2")
            assert fetched() == ["tiny_train_000000.bin", "tiny_train_000001.bin", "tiny_val_000000.bin"]
            assert "its token files are not complete on this disk yet" in trained(longer, "--dry-run")
            server.requests.clear()
            trained(longer)
            assert fetched() == ["tiny_train_000002.bin", "tiny_train_000003.bin"]
            assert "resuming from" in trained(short)
            trained(local)
            # With any number of downloaded shards, the trained model is the same, bit for bit.
            assert metrics(short, "state_sha256") == metrics(local, "state_sha256")
            trained(mixed)
            assert fetched()[2:] == ["tiny_train_000004.bin"]  # a shuffle may read any token
            before = len(server.requests)
            trained(longer, "--resume", "never")
            assert len(server.requests) == before
    finally:
        shutil.rmtree(target.parent, ignore_errors=True)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_held_out_tokens_can_be_downloaded_alone(tmp_path: Path, kind: str) -> None:
    published, directory, cache = tmp_path / "published", tmp_path / "downloaded", tmp_path / "cache"
    published.mkdir()
    ids = np.arange(100, dtype=np.uint16)
    for split, word in (("validation", "val"), ("train", "train")):
        if kind == "bin":
            write_llm_c(published / f"tiny_{word}_000000.bin", ids)
        else:
            save_file({"tokens": ids}, published / f"{split}.safetensors")
        if split == "validation" and kind == "bin":
            with serve({"owner/tokens": published}) as server:
                done = download(server.url, directory, cache)
            assert "dataset owner/tokens: contains no token files; to prepare its text, run" in done.stderr
            assert not (directory / "download.json").exists()
    with serve({"owner/tokens": published}) as server:
        assert download(server.url, directory, cache, train_tokens=0).returncode == 0
        assert open_split(directory, "validation").length == 100
        assert not has_split(directory, "train")
        assert hub.is_complete(directory, 0) and not hub.is_complete(directory)
        assert download(server.url, directory, cache).returncode == 0
    assert open_split(directory, "train").length == 100
    assert hub.is_complete(directory)
    assert hub.hub_name(directory) == "owner/tokens"


def test_an_unreachable_dataset_is_one_error_line(tmp_path: Path) -> None:
    with serve({}) as server:
        for url in ("http://127.0.0.1:9", server.url):
            done = download(url, tmp_path / "a", tmp_path / "cache")
            assert done.returncode == 1
            [line] = done.stderr.splitlines()[-1:]
            assert "owner/tokens: cannot be downloaded into" in line and "or name a directory with files" in line


@pytest.mark.slow
def test_a_hub_dataset_is_resumed_at_its_first_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataset").mkdir()
    texts = [f"document {number} of the hub" for number in range(500)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "dataset" / "train.parquet")

    def begin(source: str, out: str) -> "subprocess.CompletedProcess[str]":
        options = ("--tokenizer", "bytes", "--executor", "inline", "--validation-fraction", "0")
        return run(PREPARE, source, "--output", tmp_path / out, *options, **own(server.url, tmp_path / "cache"))

    def commit(out: str) -> str:
        plan = json.loads((tmp_path / out / "plan.json").read_text())
        return re.findall("@(.{40})/train.parquet", plan["sources"][0]["inputs"][0]["path"])[0]

    old, new = hub_server.COMMIT, "b" * 40
    with serve({"owner/text": tmp_path / "dataset"}) as server:
        done = begin("hf:owner/text", "out")
        assert done.returncode == 0, done.stderr
        monkeypatch.setattr(hub_server, "COMMIT", new)
        assert "is already complete" in begin("hf:owner/text", "out").stderr
        assert begin("hf:owner/text", "newer").returncode == 0
        assert begin(f"hf:owner/text@{old}", "older").returncode == 0
        missing = begin("hf:owner/nothing", "none")
    assert [commit(out) for out in ("out", "newer", "older")] == [old, new, old]
    assert texts_of(tmp_path / "out", "train") == texts
    assert missing.returncode == 1
    assert "hf:owner/nothing: cannot be resolved on the hub" in missing.stderr.splitlines()[-1]


def test_free_disk_is_checked_before_a_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def snapshot(*_: object, dry_run: bool = False, **__: object) -> list[SimpleNamespace]:
        calls.append(dry_run)
        names = ("train.safetensors", "validation.safetensors")
        return [
            SimpleNamespace(filename=name, file_size=10**18, will_download=name == names[0], commit_hash="0" * 40)
            for name in names
        ]

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(BadInput, match=r"dataset owner/tokens: got .* free at .*, wanted 1,?000.* (P|E|T)B; free some"):
        hub.download_dataset("owner/tokens", tmp_path / "x")
    assert calls and all(calls)
