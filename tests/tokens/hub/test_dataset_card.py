"""The dataset card tells what the manifest tells."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import shared
from tests.hub_server import Hub, environment
from tests.tokens.hub.conftest import NAME, published, push
from tests.tokens.preparing import files_of, jsonl, write
from tokens.hub.upload import size_category


def test_the_card_says_what_the_manifest_says(hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(
        out,
        jsonl(tmp_path / "a|b.jsonl", ["ab"] * 1000),
        validation_fraction=0.1,
        tokenizer=str(shared("gpt2.tiktoken")),
    )
    assert push(hub, out, NAME, "--license", "mit").returncode == 0
    card = published(hub)["README.md"].decode()
    front, body = card.removeprefix("---\n").split("---\n", 1)
    assert "license: mit\n" in front
    assert "pretty_name: tokens\n" in front
    assert "size_categories:\n- 1K<n<10K\n" in front
    assert "1,000 documents, 2,000 tokens of the tokenizer `gpt2.tiktoken`" in body
    assert "| `a\\|b.jsonl` | 1 | 15,000 |" in body
    assert "end-of-text id 50256" in body
    assert "train 90.00%, validation 10.00%; held out are the last documents" in body
    for name, digest in files_of(out).items():
        assert f"`{name}`" in body
        assert f"`{digest}`" in body
    assert f'"dataset": "{NAME}"' in body
    assert "tokenizer.tiktoken" in published(hub)
    code = body.split("```python\n")[1].split("```")[0] + "assert len(documents) == 901 and not len(documents[-1])\n"
    example = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment(hub)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert example.returncode == 0, example.stderr


def test_size_categories_are_the_hubs() -> None:
    sizes = {0: "n<1K", 999: "n<1K", 1000: "1K<n<10K", 123_456: "100K<n<1M", 10**6: "1M<n<10M", 10**12: "n>1T"}
    assert {count: size_category(count) for count in sizes} == sizes
