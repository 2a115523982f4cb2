"""File names of other programs' token files: their split, and what makes up a set."""

import pytest

from common.errors import BadInput
from tokens.format.foreign_names import foreign_names, parse_name


@pytest.mark.parametrize(
    ("name", "split", "token_set", "number"),
    [
        ("fineweb_train_000001.bin", "train", "fineweb", 1),
        ("fineweb_val_000000.bin", "validation", "fineweb", 0),
        ("edu_fineweb_val_000000.bin", "validation", "edu_fineweb", 0),
        ("edufineweb_train_000099.npy", "train", "edufineweb", 99),
        ("tiny_shakespeare_train.bin", "train", "tiny_shakespeare", None),
        ("train.bin", "train", "", None),
        ("val.bin", "validation", "", None),
        ("test.npy", "test", "", None),
        ("pytorch_model.bin", None, "pytorch_model", None),
        ("train_val_000001.bin", None, "", 1),
        ("trainer.bin", None, "trainer", None),
    ],
)
def test_a_name_tells_split_set_and_number(name: str, split: str | None, token_set: str, number: int | None) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert (parsed.split, parsed.token_set, parsed.number) == (split, token_set, number)
    assert parsed.is_bare == (name in ("train.bin", "val.bin", "test.npy"))


@pytest.mark.parametrize("name", ["meta.pkl", "train.safetensors", ".train.bin", "bin", "train.bin.gz", "README.md"])
def test_other_files_are_no_token_files(name: str) -> None:
    assert parse_name(name) is None


def test_files_are_in_the_order_of_their_numbers() -> None:
    names = ["a_train_000002.bin", "a_val_000000.bin", "README.md", "a_train_000001.bin"]
    wanted = {"train": ["a_train_000001.bin", "a_train_000002.bin"], "validation": ["a_val_000000.bin"]}
    assert foreign_names("tokens", names) == wanted
    names = [f"train_{number}.bin" for number in range(7, 12)]
    assert foreign_names("tokens", names[::-1]) == {"train": names}
    assert foreign_names("tokens", []) == {}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a_train_1.bin", "a_2.bin"], "^tokens/a_2.bin: is it training or validation data"),
        (["train_val.bin"], "^tokens/train_val.bin: is it training or validation data"),
        (["a_train_1.bin", "a_val_1.npy"], "holds both a_train_1.bin and a_val_1.npy; keep files of one format"),
        (["a_train_1.bin", "b_train_2.bin"], "holds a_train_1.bin and b_train_2.bin, of two sets of tokens; keep one"),
        (["a_train.bin", "a_train_1.bin"], "holds both a_train.bin and a_train_1.bin; keep one of them"),
        (["a_train_1.bin", "a_train_01.bin"], "holds both a_train_01.bin and a_train_1.bin; keep one of them"),
        (["a_train_1.bin", "a_train_2.bin", "a_train_4.bin"], "the one after a_train_2.bin is missing; download it"),
    ],
)
def test_files_that_make_up_no_set_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        foreign_names("tokens", names)
