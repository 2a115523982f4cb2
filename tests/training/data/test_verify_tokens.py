"""Verification of token files: all machines must have the same files, which must not change while a run reads them."""

import os
import time
from pathlib import Path

import attrs
import numpy as np
import pytest
from safetensors.numpy import save_file

from common.errors import BadInput
from common.files import sha256
from tokens.format.manifest import Content
from tokens.format.token_file import open_split
from training.data.verify_tokens import TokenWatch, agreed_contents

CONTENT = Content(size_bytes=8, sha256="0" * 64, max_id=1)


def test_machines_agree_on_every_file() -> None:
    contents = {"train-00000-of-00002.safetensors": CONTENT, "train-00001-of-00002.safetensors": CONTENT}
    assert agreed_contents(Path("tokens"), [contents, dict(contents)]) == contents
    for name in contents:
        changed = contents | {name: attrs.evolve(CONTENT, sha256="1" * 64)}
        with pytest.raises(
            BadInput, match=f"tokens/{name}: machine 3 of 3 has no file of this name, or a file that differs"
        ):
            agreed_contents(Path("tokens"), [contents, contents, changed])
    with pytest.raises(BadInput, match=r"tokens/train-00000-of-00002\.safetensors: machine 2 of 2"):
        agreed_contents(Path("tokens"), [contents, {"train.safetensors": CONTENT}])


def test_changed_token_files_are_refused_unless_only_touched(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    save_file({"tokens": np.arange(1000, dtype=np.uint16)}, path)
    content, tokens = path.read_bytes(), open_split(tmp_path, "train")
    watch, watch_without_digests = TokenWatch([tokens], {path: sha256(path)}), TokenWatch([tokens], {})
    assert watch.check(wait=True) == []
    os.utime(path, ns=(1, 1))
    assert (watch.check(wait=True), watch.check(wait=True)) == ([path], [])
    with pytest.raises(BadInput, match=r"train\.safetensors: was modified while the run was reading it"):
        watch_without_digests.check(wait=True)
    os.utime(path, ns=(2, 2))
    touched, deadline = watch.check(wait=False), time.monotonic() + 60
    while not touched and time.monotonic() < deadline:
        touched = watch.check(wait=False)
    assert touched == [path]
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(BadInput, match=r"train\.safetensors: was modified while the run was reading it"):
        watch.check(wait=True)
    path.write_bytes(content[:-2])
    with pytest.raises(BadInput, match=r"train\.safetensors: was modified while the run was reading it"):
        watch.check(wait=False)
    path.unlink()
    assert watch.check(wait=True) == []  # a deleted file that is open can still be read
