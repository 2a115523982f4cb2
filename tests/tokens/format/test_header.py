"""Safetensors headers that are damaged, or of other tensors, are refused by name."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from common.errors import BadInput
from tests.tokens.format.token_directory import save
from tokens.format.header import HEADER_BYTES, TokenFile, read_header, write_header
from tokens.format.token_file import open_split


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        (np.arange(4, dtype=np.int64), "tokens", "got dtype I64"),
        (np.zeros((2, 2), np.uint16), "tokens", r"shape \[2, 2\], wanted U16 or U32 and one dimension"),
        (np.arange(4, dtype=np.uint16), "ids", "got tensors ids, wanted one named 'tokens'"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, values: np.ndarray, name: str, message: str) -> None:
    save(tmp_path / "train.safetensors", values, name)
    with pytest.raises(BadInput, match=message):
        open_split(tmp_path, "train")


@pytest.mark.parametrize("kept", [0, 5, 40, 150])
def test_a_file_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    path = save(tmp_path / "train.safetensors", np.arange(100, dtype=np.uint16))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadInput, match="cut short"):
        open_split(tmp_path, "train")


@pytest.mark.parametrize(
    "header", [b'{"a": ' * 100_000, b"\xff\xff", b"[]", b'{"tokens": 3}', b'{"tokens": {"dtype": "U16"}}', b"{", b"{}"]
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "train.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BadInput, match=r"train\.safetensors: (not a safetensors file|got tensors none)"):
        open_split(tmp_path, "train")


def test_one_flipped_bit_in_a_header_is_refused_by_name_or_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path / "train.safetensors", np.arange(100, dtype=np.uint16))
    good, intact = path.read_bytes(), open_split(tmp_path, "train").files
    for bit in range(8 * intact[0].offset_bytes):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            files = open_split(tmp_path, "train").files
        except BadInput as error:
            assert str(error).startswith(str(path)), bit
        else:
            assert files == intact, bit


@pytest.mark.parametrize("kind", ["<u2", "<u4"])
def test_what_is_written_is_read_back_by_us_and_by_safetensors(tmp_path: Path, kind: str) -> None:
    path, values = tmp_path / "train.safetensors", np.arange(1000, dtype=kind)
    with path.open("w+b") as file:
        write_header(file, values.dtype, len(values))
        file.write(values.tobytes())
    assert read_header(path) == TokenFile(path, values.dtype, HEADER_BYTES, 1000)
    assert load_file(path)["tokens"].tolist() == values.tolist()
