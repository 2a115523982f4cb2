"""Verification of token files: every machine has the same ones."""

from pathlib import Path

import attrs
import pytest

from common.errors import BadInput
from tokens.format.manifest import Content
from training.data.verify_tokens import agreed_contents

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
