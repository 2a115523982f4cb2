"""Safetensors headers that are damaged, or of other tensors, are refused by name."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from common.errors import BadInput
from tests.tokens.format.token_directory import save
from tokens.format.header import HEADER_BYTES, TokenFile, read_header, write_header
from tokens.format.token_file import open_split


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
    assert safetensors.numpy.load_file(path)["tokens"].tolist() == values.tolist()


def of_other_tensors(values: np.ndarray, name: str = "tokens") -> bytes:
    return safetensors.numpy.save({name: values})


GOOD = of_other_tensors(np.arange(100, dtype=np.uint16))
WRONG: list[tuple[bytes, str]] = [
    (of_other_tensors(np.arange(4, dtype=np.int64)), "got dtype I64"),
    (of_other_tensors(np.zeros((2, 2), np.uint16)), r"shape \[2, 2\], wanted U16 or U32 and one dimension"),
    (of_other_tensors(np.arange(4, dtype=np.uint16), "ids"), "got tensors ids, wanted one named 'tokens'"),
    *((GOOD[:kept], "cut short") for kept in (0, 5, 40, 150)),
    *(
        (len(header).to_bytes(8, "little") + header, "not a safetensors file|got tensors none")
        for header in (
            b'{"a": ' * 100_000,
            b"\xff\xff",
            b"[]",
            b'{"tokens": 3}',
            b'{"tokens": {"dtype": "U16"}}',
            b"{}",
        )
    ),
]


@pytest.mark.parametrize(("content", "said"), WRONG)
def test_what_is_no_token_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "train.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=rf"{path}: .*({said})"):
        open_split(tmp_path, "train")
