"""Token set: the order of the files that a run reads."""

from pathlib import Path

import attrs
import numpy as np
import pytest
from safetensors.numpy import save_file

from tokens.format.token_file import open_split
from training.data.open_tokens import TokenDirectory, as_begun


@pytest.fixture
def opened(tmp_path: Path) -> TokenDirectory:
    """An opened directory of 1,000 tokens to train on, without a manifest."""
    save_file({"tokens": np.arange(1000, dtype=np.uint16)}, tmp_path / "train.safetensors")
    stream = open_split(tmp_path, "train")
    return TokenDirectory(dataset="a", path=tmp_path, manifest=None, train=stream, validation=None)


def test_a_run_keeps_the_order_of_the_files_that_it_began_with(opened: TokenDirectory, tmp_path: Path) -> None:
    for number in (9, 10):
        header = np.array([20240520, 1, 10], dtype=np.int32).tobytes().ljust(1024, b"\0")  # llm.c's
        tokens = np.full(10, number, dtype=np.uint16).tobytes()
        (tmp_path / f"fineweb_train_{number}.bin").write_bytes(header + tokens)
    (tmp_path / "train.safetensors").unlink()
    directory = attrs.evolve(opened, train=open_split(tmp_path, "train"))
    assert [file.path.name for file in directory.train.files] == ["fineweb_train_9.bin", "fineweb_train_10.bin"]
    begun = as_begun(directory, [["fineweb_train_10.bin", "fineweb_train_9.bin"]])
    assert [int(begun.train.read(start, 1)[0]) for start in (0, 10)] == [10, 9]
    for other in ([], [["fineweb_train_10.bin"]], [["fineweb_train_9.bin", "fineweb_train_10.bin"]]):
        assert as_begun(directory, other).train is directory.train
