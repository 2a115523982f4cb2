"""What a run's tokens are, agreed over machines and with the checkpoint that it goes on from."""

import os
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from safetensors.numpy import save_file

from common.errors import BadInput
from common.files import sha256
from tokens.format.manifest import Content
from tokens.format.token_file import open_split
from training.checkpoints.compatibility import differences
from training.data.verify_tokens import agreed_contents
from training.data.watch_tokens import TokenWatch

CONTENT = Content(size_bytes=8, sha256="0" * 64, max_id=1)


def test_machines_agree_on_every_file() -> None:
    here = {"train-00000-of-00002.safetensors": CONTENT, "train-00001-of-00002.safetensors": CONTENT}
    assert agreed_contents(Path("tokens"), [here, dict(here)]) == here
    for name in here:
        other = here | {name: attrs.evolve(CONTENT, sha256="1" * 64)}
        with pytest.raises(BadInput, match=f"tokens/{name}: machine 3 of 3 has another file of this name"):
            agreed_contents(Path("tokens"), [here, here, other])
    with pytest.raises(BadInput, match=r"tokens/train-00000-of-00002\.safetensors: machine 2 of 2"):
        agreed_contents(Path("tokens"), [here, {"train.safetensors": CONTENT}])


def test_a_token_file_that_was_only_touched_is_read_on_and_another_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    save_file({"tokens": np.arange(1000, dtype=np.uint16)}, path)
    content, tokens = path.read_bytes(), open_split(tmp_path, "train")
    watch, ignorant = TokenWatch([tokens], {path: sha256(path)}), TokenWatch([tokens], {})
    assert watch.check(wait=True) == []
    os.utime(path, ns=(1, 1))
    assert (watch.check(wait=True), watch.check(wait=True)) == ([path], [])
    with pytest.raises(BadInput, match=r"train\.safetensors: was written while the run read it"):
        ignorant.check(wait=True)
    os.utime(path, ns=(2, 2))
    found, deadline = watch.check(wait=False), time.monotonic() + 60
    while not found and time.monotonic() < deadline:
        found = watch.check(wait=False)
    assert found == [path]
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(BadInput, match=r"train\.safetensors: was written while the run read it"):
        watch.check(wait=True)
    path.write_bytes(content[:-2])
    with pytest.raises(BadInput, match=r"train\.safetensors: was written while the run read it"):
        watch.check(wait=False)
    path.unlink()
    assert watch.check(wait=True) == []  # what is open can be read


def stream(*digests: str | None, tokens: int = 100) -> dict[str, Any]:
    names = [f"train-{index:05d}-of-{len(digests):05d}.safetensors" for index in range(len(digests))]
    return {"directory": "tokens", "tokens": tokens, "files": names, "sha256": list(digests)}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (stream("a", "b"), stream("a", "c"), "tokens/train-00001-of-00002.safetensors: damaged, or another file than"),
        (stream("a"), stream("a", tokens=99), "tokens: its 99 train tokens are not the 100 that step-1 was made with"),
        (stream("a"), stream("a", "b"), "tokens: its train tokens are cut into other files than those that step-1"),
    ],
)
def test_other_tokens_than_a_checkpoints_are_named(old: dict[str, Any], new: dict[str, Any], message: str) -> None:
    before, now = ({"train_stream": part, "validation_stream": None} for part in (old, new))
    with pytest.raises(BadInput, match=message):
        differences(None, before, now, Path("step-1"))  # type: ignore[arg-type]  # nothing else is looked at


def test_what_an_older_checkpoint_does_not_tell_is_not_compared() -> None:
    configuration = {"model": {}, "train": {}, "global_batch_size": 8}
    before = {"train_stream": stream(None), **configuration}  # of a directory without a manifest
    now = {"train_stream": stream("a"), "validation_stream": stream("b"), **configuration}
    assert differences(None, before, now, Path("step-1")) == []  # type: ignore[arg-type]
