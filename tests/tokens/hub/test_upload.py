"""Token directories on the hub: exactly the pushed files can be downloaded, and nothing private is published."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, only_line, shared
from tests.hub_server import TOKEN, Hub, environment, serve
from tests.tokens.documents.reading import flipped
from tests.tokens.hub.test_download import download
from tests.tokens.preparing import PREPARE, files_of, jsonl, run, succeed, write
from tokens.documents.inputs import Input
from tokens.documents.sources import Source
from tokens.format.manifest import read_manifest
from tokens.format.token_file import open_split
from tokens.hub.upload import public_manifest, public_name
from tokens.prepare.verify import verify
from tokens.stats.stats import stats

NAME = "owner/tokens"


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Return a finished directory that was made from a folder with a private name."""
    folder = tmp_path / "secret-client"
    folder.mkdir()
    source = jsonl(folder / "letters.jsonl", [f"letter {number}" for number in range(300)] + [None])  # type: ignore[list-item]
    write(tmp_path / "out", source, validation_fraction=0.1, unit_bytes=1000)
    return tmp_path / "out"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serve({}) as server:
        server.new = tmp_path / "hub"
        yield server


def push(hub: Hub, *options: str | Path, token: str | None = TOKEN) -> "subprocess.CompletedProcess[str]":
    return run(PREPARE, "push", *options, **environment(hub, token))


def published(hub: Hub) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in hub.datasets[NAME].iterdir()}


def test_pushed_files_can_be_downloaded_unchanged(prepared: Path, hub: Hub, tmp_path: Path) -> None:
    stats(prepared)  # this draws a chart, which is uploaded as well
    done = push(hub, prepared, NAME, "--license", "odc-by")
    assert done.returncode == 0, done.stderr
    assert (
        f'{hub.url}/datasets/{NAME}: 6 files; to train on them, write "dataset": "{NAME}" in train.json' in done.stdout
    )
    assert download(hub.url, tmp_path / "again", tmp_path / "cache").returncode == 0
    assert files_of(tmp_path / "again") == files_of(prepared)
    assert "all unchanged" in verify(str(tmp_path / "again"))[0]
    assert open_split(tmp_path / "again", "train").length == open_split(prepared, "train").length
    done = push(hub, prepared, NAME)
    assert done.returncode == 0, done.stderr
    assert "keeps its README.md; to get a new card" in done.stdout
    assert len(hub.commits) == 1  # the second push had nothing new
    assert len([line for line in hub.requests if line.startswith("PUT")]) == 3


def test_published_conversations_keep_template_and_weights(hub: Hub, tmp_path: Path) -> None:
    source, out = tmp_path / "talks.jsonl", tmp_path / "talks"
    source.write_text(json.dumps({"instruction": "a", "output": "b"}) + "\n")
    write(out, source, template="alpaca", context_length=200)
    assert push(hub, out, NAME).returncode == 0
    card = published(hub)["README.md"].decode()
    assert "Conversations as tokens, ready to train on: 1 conversations, 201 tokens" in card
    assert "rows of 200 tokens: 1.00% count in the loss" in card and "{{ '\\n\\n### Response:\\n' + message" in card
    assert "`tokens`, and a tensor `weights`" in card and ".reshape(-1, 200)" in card
    assert download(hub.url, tmp_path / "again", tmp_path / "cache").returncode == 0
    manifest = read_manifest(out)
    assert manifest is not None and read_manifest(tmp_path / "again") == public_manifest(manifest)
    assert open_split(tmp_path / "again", "train").context_length == 200


def test_an_upload_reveals_nothing_about_this_machine(prepared: Path, hub: Hub, tmp_path: Path) -> None:
    assert b"secret-client" in (prepared / "manifest.json").read_bytes()
    assert b"secret-client" in (prepared / "ledger.jsonl").read_bytes()
    assert push(hub, prepared, NAME).returncode == 0
    files = published(hub)
    assert set(files) == {"README.md", "manifest.json", "ledger.jsonl", "train.safetensors", "validation.safetensors"}
    for name, content in files.items():
        for secret in (b"secret-client", str(tmp_path).encode()):
            assert secret not in content, name
    assert json.loads(files["manifest.json"])["sources"][0]["name"] == "letters.jsonl"
    assert json.loads(files["manifest.json"])["problems"] == {"null text": 1}


@pytest.mark.parametrize(
    ("source", "public"),
    [
        ("stdlib", "stdlib"),
        ("hf:HuggingFaceFW/fineweb:sample-10BT", "hf:HuggingFaceFW/fineweb:sample-10BT"),
        ("/home/me/client/text.jsonl", "text.jsonl"),
        ("../client/*.parquet", "*.parquet"),
        (".", "local files"),
        ("s3://bucket/text/*.jsonl", "s3://bucket/text/*.jsonl"),
        ("https://me:password@host/a.jsonl?X-Amz-Signature=abc#x", "https://host/a.jsonl"),
    ],
)
def test_public_names_hide_folders_and_secrets(source: str, public: str) -> None:
    assert public_name(source) == public


@pytest.mark.parametrize("name", ["owner/words:small", "hf:owner/words:small"])
def test_a_published_hub_source_keeps_its_owner(name: str) -> None:
    inputs = (Input(f"hf://datasets/owner/words@{'0' * 40}/a.jsonl", 5, "blob_id 1"),)
    assert public_name(Source(name, inputs).record.name) == "hf:owner/words:small"
    local = Source("owner/words", (Input("/home/me/owner/words/a.jsonl", 5, "mtime 1"),))
    assert public_name(local.record.name) == "words"  # folders of this machine are private


def test_a_killed_upload_resumes_and_stays_invisible(prepared: Path, hub: Hub) -> None:
    small = (prepared / "validation.safetensors").stat().st_size
    command = [*PREPARE, "push", str(prepared), NAME]
    uploading = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment(hub)})
    hub.before_upload = lambda size: uploading.kill() is None if size == small else True
    assert uploading.wait(60) < 0
    assert published(hub) == {}  # an incomplete upload cannot be downloaded
    hub.before_upload = lambda size: True
    train = f"PUT /objects/{files_of(prepared)['train.safetensors']}"
    assert hub.requests.count(train) == 1
    assert push(hub, prepared, NAME).returncode == 0
    assert hub.requests.count(train) == 1  # it was already uploaded
    assert (hub.datasets[NAME] / "train.safetensors").read_bytes() == (prepared / "train.safetensors").read_bytes()


def test_a_bad_upload_is_refused_before_sending(prepared: Path, hub: Hub, tmp_path: Path) -> None:
    message = only_line(push(hub, prepared, NAME, token=None))
    assert "no access token for the Hugging Face hub: run `hf auth login`" in message
    assert "tokens: not a repository name; wanted OWNER/NAME" in only_line(push(hub, prepared, "tokens"))
    assert "wanted OWNER/NAME" in only_line(push(hub, prepared, "datasets/owner/tokens"))
    message = only_line(push(hub, prepared, NAME, "--license", "a: b"))
    assert "--license: got 'a: b', wanted a license of the hub" in message
    assert "manifest.json: missing; only a finished preparation" in only_line(push(hub, tmp_path, NAME))
    manifest = (prepared / "manifest.json").read_text()
    entry = {"size_bytes": 1, "sha256": "", "max_id": 0, "tokens": 0, "dtype": ""}
    (prepared / "manifest.json").write_text(manifest.replace('files": {', f'files": {{"../key": {json.dumps(entry)},'))
    assert "files: got ../key, wanted token files of train" in only_line(push(hub, prepared, NAME))
    (prepared / "manifest.json").write_text(manifest)
    data = (prepared / "train.safetensors").read_bytes()
    (prepared / "train.safetensors").write_bytes(flipped(data, len(data) - 1))
    assert "train.safetensors: damaged: got sha256" in only_line(push(hub, prepared, NAME))
    assert hub.requests == []


def test_a_refusing_or_unreachable_hub_is_one_error_line(prepared: Path, hub: Hub) -> None:
    assert "run `hf auth login` with a token that may write" in only_line(push(hub, prepared, NAME, token="hf_read"))
    message = only_line(push(hub, prepared, "somebody/tokens"))
    assert "You don't have the rights to create a dataset under the namespace" in message
    hub.before_upload = lambda size: False
    message = only_line(push(hub, prepared, NAME))
    assert message.startswith(f"prepare_data.py: dataset {NAME}: cannot be uploaded: ") and "Out of order" in message
    hub.url = "http://127.0.0.1:9"
    assert "rerun the same command to resume" in only_line(push(hub, prepared, NAME))


def test_a_private_dataset_stays_private(prepared: Path, hub: Hub) -> None:
    assert push(hub, prepared, NAME, "--private").returncode == 0
    assert hub.private == {NAME}
    assert push(hub, prepared, NAME, "--private").returncode == 0
    hub.private.clear()
    assert "owner/tokens: exists and is public" in only_line(push(hub, prepared, NAME, "--private"))


def test_different_tokens_on_the_hub_are_not_overwritten(prepared: Path, hub: Hub, tmp_path: Path) -> None:
    assert push(hub, prepared, NAME).returncode == 0
    before = published(hub)
    write(tmp_path / "other", jsonl(tmp_path / "a.jsonl", ["other"] * 20))
    assert "owner/tokens: already contains a different train.safetensors" in only_line(
        push(hub, tmp_path / "other", NAME)
    )
    assert published(hub) == before


@pytest.mark.slow
def test_the_dataset_card_agrees_with_the_manifest(hub: Hub, tmp_path: Path) -> None:
    out, source = tmp_path / "out", jsonl(tmp_path / "a|b.jsonl", ["ab"] * 1000)
    write(out, source, validation_fraction=0.1, tokenizer=str(shared("gpt2.tiktoken")))
    assert push(hub, out, NAME, "--license", "mit").returncode == 0
    card = published(hub)["README.md"].decode()
    front, body = card.removeprefix("---\n").split("---\n", 1)
    assert "license: mit\n" in front
    assert "pretty_name: tokens\n" in front
    assert "1,000 documents, 2,000 tokens made with the tokenizer `gpt2.tiktoken`" in body
    assert "| `a\\|b.jsonl` | 1 | 15,000 |" in body
    assert "end-of-text id 50256" in body
    assert "train 90.00%, validation 10.00%; the held-out documents are the last documents" in body
    for name, digest in files_of(out).items():
        assert f"`{name}`" in body
        assert f"`{digest}`" in body
    assert f'"dataset": "{NAME}"' in body
    assert "tokenizer.tiktoken" in published(hub)
    code = body.split("```python\n")[1].split("```")[0] + "assert len(documents) == 901 and not len(documents[-1])\n"
    succeed([sys.executable, "-c", code], **environment(hub))
