"""Files of llm.c, nanoGPT and numpy are read without conversion; unknown, mixed and damaged ones are refused."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.errors import BadInput
from tests.tokens.format.token_directory import check_flips, write_llm_c, write_nanogpt
from tokens.format.foreign_files import describe_missing_first, foreign_names, parse_name, read_foreign_header
from tokens.format.manifest import read_content
from tokens.format.token_file import TokenStream, open_split

FEW = np.arange(1000, dtype=np.uint16)


def save_npy_2(path: Path, tokens: np.ndarray) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array(file, tokens, (2, 0))


@pytest.mark.parametrize(
    ("name", "write", "kind"),
    [
        *(("a_train_1.bin", write_llm_c, kind) for kind in ("<u2", "<u4")),
        *(("train.bin", write, "<u2") for write in (write_llm_c, write_nanogpt)),
        ("a_train_1.npy", np.save, "<u2"),
        ("train.npy", np.save, "<u4"),
        ("train.npy", save_npy_2, "<u2"),  # version 3 is only for arrays with named fields
    ],
)
def test_foreign_files_are_read_without_conversion(tmp_path: Path, name: str, write: object, kind: str) -> None:
    tokens = FEW.astype(kind)
    write(tmp_path / name, tokens)  # type: ignore[operator]  # one of the functions above
    file = read_foreign_header(tmp_path / name)
    assert (file.dtype.str, file.length) == (kind, 1000)
    assert TokenStream([file]).read(0, 1000).tolist() == tokens.tolist()
    assert read_content(file).max_id == 999


def llm_c(magic: int = 20240520, version: int = 1, count: int = 4, data: bytes = b"12345678") -> bytes:
    return struct.pack("<3i", magic, version, count).ljust(1024, b"\0") + data


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def beheaded(header: bytes) -> bytes:
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + FEW.tobytes()


NPY_HEADERS = (b"(" * 9000, b"-" * 9900 + b"1", b"{}", b"\0" * 40, b"{'shape': (4,)}")
WRONG: dict[str, list[tuple[bytes, str]]] = {
    "a_train_1.bin": [
        (llm_c(magic=20240522), "got magic number 20240522, wanted 20240520 or 20240801, which llm.c writes before"),
        (b"", "got magic number 0, wanted 20240520 or 20240801"),
        (llm_c(version=7), "got version 7, wanted 1 after magic number 20240520"),
        (llm_c(magic=20240801), "got version 1, wanted 7 after magic number 20240801"),
        (llm_c(count=5), "truncated or damaged: got 1032 bytes, wanted 1034; copy"),
        (llm_c(count=3), "truncated or damaged: got 1032 bytes, wanted 1030"),
        (llm_c(count=-4), "truncated or damaged: got 1032 bytes, wanted 1024"),
        (llm_c()[:100], "truncated: got 100 bytes, wanted a header of 1024; copy it again"),
    ],
    "train.bin": [
        (FEW.tobytes()[:-1], "got 1999 bytes, wanted an even number, because its tokens are uint16; copy it")
    ],
    "train.npy": [
        (npy(FEW.reshape(10, 100)), r"got type uint16 and shape \(10, 100\), wanted uint16 or uint32, little-endian"),
        (npy(FEW.astype(np.int64)), "got type int64 and shape"),
        (npy(FEW.astype(">u2")), "got type >u2 and shape"),
        (npy(FEW[0]), r"got type uint16 and shape \(\), wanted"),
        (npy(np.array(["a", None])), "not a .npy file, or truncated at .* Python objects"),  # never unpickled
        *((beheaded(header), "not a .npy file, or truncated at ") for header in NPY_HEADERS),
    ],
}


@pytest.mark.parametrize(("name", "content", "message"), [(name, *row) for name, rows in WRONG.items() for row in rows])
def test_unknown_and_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match=f"^{path}: {message}"):
        read_foreign_header(path)


def test_a_damaged_npy_file_is_refused_or_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "train.npy"
    np.save(path, FEW)
    good, intact = path.read_bytes(), read_foreign_header(path)
    for byte_count in (0, 5, 9, 100, len(good) - 1):
        path.write_bytes(good[:byte_count])
        with pytest.raises(BadInput, match=f"^{path}: (not a .npy file, or truncated|truncated or damaged)"):
            read_foreign_header(path)
    path.write_bytes(good)
    check_flips(path, range(8 * intact.offset_bytes), lambda: read_foreign_header(path))


@pytest.mark.parametrize(
    ("name", "split", "token_set", "number"),
    [
        ("fineweb_train_000001.bin", "train", "fineweb", 1),
        ("edu_fineweb_val_000000.bin", "validation", "edu_fineweb", 0),
        ("edufineweb_train_000099.npy", "train", "edufineweb", 99),
        ("val.bin", "validation", "", None),
        ("test.npy", "test", "", None),
        ("pytorch_model.bin", None, "pytorch_model", None),
        ("train_val_000001.bin", None, "", 1),
        ("trainer.bin", None, "trainer", None),
    ],
)
def test_names_state_split_set_and_number(name: str, split: str | None, token_set: str, number: int | None) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert (parsed.split, parsed.token_set, parsed.number) == (split, token_set, number)
    assert not any(map(parse_name, ("meta.pkl", "train.safetensors", ".train.bin", "bin", "a.bin.gz")))


def test_files_are_sorted_by_number() -> None:
    names = ["a_train_000002.bin", "a_val_000000.bin", "README.md", "a_train_000001.bin"]
    expected_names = {"train": ["a_train_000001.bin", "a_train_000002.bin"], "validation": ["a_val_000000.bin"]}
    assert foreign_names("tokens", names) == expected_names
    names = [f"train_{number}.bin" for number in range(7, 12)]
    assert foreign_names("tokens", names[::-1]) == {"train": names}
    assert foreign_names("tokens", []) == {}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a_train_1.bin", "a_2.bin"], "^tokens/a_2.bin: cannot tell its split; put exactly one of train, val"),
        (["train_val.bin"], "^tokens/train_val.bin: cannot tell its split; put exactly one of"),
        (["a_train_1.bin", "a_val_1.npy"], "contains both a_train_1.bin and a_val_1.npy; keep files of one format"),
        (["a_train_1.bin", "b_train_2.bin"], "a_train_1.bin and b_train_2.bin belong to different token sets; keep"),
        (["a_train.bin", "a_train_1.bin"], "contains both a_train.bin and a_train_1.bin; keep only one of them"),
        (["a_train_1.bin", "a_train_01.bin"], "contains both a_train_01.bin and a_train_1.bin; keep only one of"),
        (
            ["a_train_1.bin", "a_train_2.bin", "a_train_4.bin"],
            "incomplete shards: a_train_3.bin is missing; download it",
        ),
        (
            ["a_train_07.bin", "a_train_11.bin"],
            "incomplete shards: a_train_08.bin to a_train_10.bin are missing; downl",
        ),
    ],
)
def test_incomplete_or_mixed_sets_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        foreign_names("tokens", names)


def test_a_split_in_two_formats_is_refused(tmp_path: Path) -> None:
    save_file({"tokens": np.zeros(9, np.uint16)}, tmp_path / "train.safetensors")
    np.zeros(9, np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(BadInput, match=r"contains both train\.safetensors and train\.bin; keep files of one format"):
        open_split(tmp_path, "train")


def test_missing_first_shards_are_reported(tmp_path: Path) -> None:
    def notes(*names: str, split: str = "train") -> list[str]:
        folder = tmp_path / names[0]
        folder.mkdir()
        for name in names:
            write_llm_c(folder / name, FEW)
        return describe_missing_first(folder, open_split(folder, split).files)

    (note,) = map(str, notes("a_train_000003.bin", "a_train_000004.bin"))
    assert "its train shards start with a_train_000003.bin; earlier shards, such as a_train_000002.bin," in note
    assert len(notes("a_val_2.bin", "a_train_0.bin", split="validation")) == 1
    assert notes("a_train_000000.bin") == notes("a_train_000001.bin") == notes("train.bin") == []
    # The numbers of the train shards follow those of the validation shards.
    assert notes("a_val_000000.bin", "a_val_000001.bin", "a_train_000002.bin") == []
