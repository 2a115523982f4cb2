"""Files written all or nothing; errors that say why a file cannot be written."""

import errno
from pathlib import Path

import pytest

from common.errors import BadInput, printable, quoted
from common.files import replace_file, write_error, writing


def test_a_link_at_the_partial_name_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".partial-x").symlink_to(victim)
    replace_file(tmp_path / "x", "new")
    assert victim.read_text() == "precious"
    assert (tmp_path / "x").read_text() == "new"


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "make room"), (errno.EACCES, "permissions"), (errno.EROFS, "read-only")]
)
def test_the_advice_fits_the_reason(number: int, advice: str) -> None:
    assert advice in str(write_error("x", OSError(number, "no")))
    assert ("make room" in str(write_error("x", OSError(number, "no")))) == (number == errno.ENOSPC)


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(BadInput, match="a folder has its name"), writing(tmp_path / "x"):
        replace_file(tmp_path / "x", "new")


def test_control_characters_of_names_do_not_reach_the_terminal() -> None:
    name = "a\x1b[2Jb\nc\u202ed\udcff\x00"
    assert printable(name) == "a\\x1b[2Jb\\nc\\u202ed\\udcff\\x00"
    assert str(BadInput(name)) == printable(name)
    assert printable("Größe 模型") == "Größe 模型"


def test_values_in_errors_are_cut() -> None:
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    assert "too large to print" in quoted(nested)
    assert "too large to print" in quoted(10**5000)
    assert len(quoted("x" * 10_000)) < 140


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    replace_file(tmp_path / "x", b"\r\n\xff")
    assert (tmp_path / "x").read_bytes() == b"\r\n\xff"
