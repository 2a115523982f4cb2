"""Token streams in one file or in shards are read by position; bad sets of shards and bad headers are refused."""

import errno
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from common.errors import BadInput
from tests.tokens.format.token_directory import check_flips, save, write_llm_c
from tokens.format import token_file
from tokens.format.header import write_weighted
from tokens.format.token_file import open_split


def test_shards_are_read_as_one_stream(tmp_path: Path) -> None:
    bounds = [0, 7, 7, 30, 64]
    for index, (begin, end) in enumerate(itertools.pairwise(bounds)):
        save(tmp_path / f"train-{index:05d}-of-00004.safetensors", np.arange(begin, end, dtype=np.uint32))
    stream = open_split(tmp_path, "train")
    assert stream.length == 64
    for begin in range(64):
        for end in range(begin, 65):
            assert stream.read(begin, end - begin).tolist() == list(range(begin, end))
    assert "/train-00002-of-00004.safetensors: token 22: got id 29, wanted less than" in stream.bad_id(29, 29, 9)


def test_an_id_outside_the_vocabulary_names_file_and_offset(tmp_path: Path) -> None:
    values = np.arange(100, dtype=np.uint16) % 50
    values[[77, 90]] = 300
    path = save(tmp_path / "train.safetensors", values)
    stream = open_split(tmp_path, "train")
    stream.check_ids(0, 77, 257)
    with pytest.raises(BadInput, match=f"{path}: token 77: got id 300, wanted less than vocab_size 257"):
        stream.check_ids(20, 80, 257)


def test_a_file_truncated_during_reading_is_one_error_line(tmp_path: Path) -> None:
    path = save(tmp_path / "train.safetensors", np.arange(100_000, dtype=np.uint16))
    stream = open_split(tmp_path, "train")
    assert stream.read(99_990, 10).tolist() == list(range(34_454, 34_464))
    os.truncate(path, 100_001)
    with pytest.raises(BadInput, match=r"train\.safetensors: can no longer be read: it was truncated"):
        stream.read(40_000, 60_000)
    assert stream.read(0, 3).tolist() == [0, 1, 2]
    path.unlink()
    assert stream.read(3, 2).tolist() == [3, 4]  # an open file can still be read after it was deleted


FEW = np.arange(4, dtype=np.uint16)


save_few, save_llm_c = partial(save, values=FEW), partial(write_llm_c, tokens=FEW)
save_wide = partial(write_llm_c, tokens=FEW.astype("<u4"))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_stream_keeps_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "OPEN_FILES", 3)
    for index in range(20):
        save(tmp_path / f"train-{index:05d}-of-00020.safetensors", np.full(10, index, np.uint16))
    stream = open_split(tmp_path, "train")
    before = open_files()
    for _ in range(2):
        assert stream.read(0, 200).tolist() == np.repeat(np.arange(20), 10).tolist()
    assert open_files() <= before + 3
    del stream
    assert open_files() == before


UNREADABLE: dict[str, Callable[[Path], object]] = {
    **{"pipe": os.mkfifo, "folder": Path.mkdir, "no permission": save_few, "too long": save_few},
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_token_files_are_one_error_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    UNREADABLE[kind](tmp_path / "train-00000-of-00001.safetensors")
    if kind == "no permission":
        monkeypatch.setattr(os, "open", refuse)
    advice = "move it away" if kind in ("pipe", "folder") else "check name and permissions"
    with pytest.raises(BadInput, match=f"cannot be read: .*; {advice}"):
        open_split(tmp_path / ("x" * 300) if kind == "too long" else tmp_path, "train")


ONE, FIRST = ({f"train-00000-of-0000{count}.safetensors": save_few} for count in (1, 2))
SETS: list[tuple[dict[str, Callable[[Path], object]], str]] = [  # functions that write files, expected message
    ({}, r"no train tokens \(\.safetensors, \.bin, \.npy\); prepare some with prepare_data.py, or name another"),
    (FIRST, r"missing train-00001-of-00002\.safetensors"),
    # The check does not loop over the missing shards.
    ({"train-00000-of-99999999999.safetensors": save_few}, r"missing train-00000000000-of-99999999999\.safetensors"),
    (ONE | FIRST, r"several sets of shards of train: train-00000-of-00002.*; keep only"),
    (ONE | {"train.safetensors": save_few}, r"contains both train\.safetensors and train-00000-of-00001\.safetensors"),
    ({"train.bin": save_llm_c, "val.bin": FEW.tofile}, r"val\.bin: got no header, wanted a header as in train\.bin"),
    ({"train.bin": save_llm_c, "val.bin": save_wide}, r"val\.bin: got uint32, wanted uint16 as in train\.bin"),
    ({"train.bin": FEW.tofile, "validation.safetensors": save_few}, r"both validation\.safetensors and train\.bin"),
]


@pytest.mark.parametrize(("writers", "message"), SETS)
def test_incomplete_or_mixed_files_are_refused(
    tmp_path: Path, writers: dict[str, Callable[[Path], object]], message: str
) -> None:
    for name, write in writers.items():
        write(tmp_path / name)
    with pytest.raises(BadInput, match=message):
        open_split(tmp_path, "train")


def test_only_token_files_are_opened(tmp_path: Path) -> None:
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "train.bin")
    for name in ("meta.pkl", "prepare.py"):
        os.mkfifo(tmp_path / name)  # opening a named pipe would wait forever
    assert open_split(tmp_path, "train").length == 9


def test_a_flipped_header_bit_is_reported_or_harmless(tmp_path: Path) -> None:
    path = save(tmp_path / "train.safetensors", np.arange(100, dtype=np.uint16))
    length = open_split(tmp_path, "train").files[0].offset_bytes
    check_flips(path, range(8 * length), lambda: open_split(tmp_path, "train").files)


def test_weights_are_read_by_position_across_shards(tmp_path: Path) -> None:
    tokens, weights = np.arange(41, dtype="<u4"), np.arange(41) % 3 == 0
    for index, (begin, end) in enumerate([(0, 7), (7, 7), (7, 41)]):
        path = tmp_path / f"train-{index:05d}-of-00003.safetensors"
        write_weighted(path, tokens[begin:end], weights[begin:end], 10)
        assert safetensors.numpy.load_file(path)["weights"].tolist() == weights[begin:end].tolist()
    stream, got = open_split(tmp_path, "train"), np.empty(30, np.uint8)
    stream.read_weights_into(got, 5)
    assert (got == weights[5:35]).all() and (stream.read(5, 30) == tokens[5:35]).all()
    assert (stream.weighted, stream.context_length) == (True, 10)
    save(tmp_path / "test.safetensors", tokens)
    plain = open_split(tmp_path, "test")
    plain.read_weights_into(got, 5)
    assert got.all() and (plain.weighted, plain.context_length) == (False, None)
    write_weighted(tmp_path / "train-00001-of-00003.safetensors", tokens[7:7], weights[7:7], 20)
    with pytest.raises(BadInput, match=r"00001.*: got rows of 20 weights, wanted rows of 10 weights as in"):
        open_split(tmp_path, "train")


def of_weights(weights: np.ndarray, metadata: dict[str, str] | None) -> bytes:
    return safetensors.numpy.save({"tokens": np.arange(100, dtype=np.uint16), "weights": weights}, metadata)


def of_other_tensors(values: np.ndarray, name: str = "tokens") -> bytes:
    return safetensors.numpy.save({name: values})


GOOD = of_other_tensors(np.arange(100, dtype=np.uint16))
HEADERS = (b'{"a": ' * 100_000, b"\xff\xff", b"[]", b'{"tokens": 3}', b'{"tokens": {"dtype": "U16"}}', b"{}")
WRONG: list[tuple[bytes, str]] = [
    (of_other_tensors(np.arange(4, dtype=np.int64)), "tensor 'tokens' cannot be read: got .*I64"),
    (of_other_tensors(np.zeros((2, 2), np.uint16)), r"\[2, 2\].*, wanted one dimension of U16 or U32"),
    (of_other_tensors(np.arange(4, dtype=np.uint16), "ids"), "got tensors ids, wanted only 'tokens'"),
    (of_weights(np.ones(100, np.uint8), None), "has weights, but its metadata has no valid"),
    (of_weights(np.ones(100, np.uint8), {"context_length": "-9"}), "has weights, but its metadata has no valid"),
    (of_weights(np.ones(99, np.uint8), {"context_length": "9"}), "'weights' cannot be read: got .*, wanted one U8"),
    (of_weights(np.ones(100, np.float32), {"context_length": "9"}), "'tokens' cannot be read: .* at the start"),
    *((GOOD[:length], "truncated") for length in (0, 5, 40, 150)),
    *((len(h).to_bytes(8, "little") + h, "not a safetensors file|got tensors none|cannot be read") for h in HEADERS),
]


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_other_files_are_not_read_as_tokens(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=rf"{path}: .*({message})"):
        open_split(tmp_path, "train")
