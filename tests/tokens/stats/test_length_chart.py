"""Any lengths and any directory name can be drawn."""

from pathlib import Path

import numpy as np
import pytest

from tokens.stats.length_chart import CHART, draw_chart


@pytest.mark.parametrize("lengths", [[0], [0, 1], [1], [5], [1, 2, 3], [700_000]])
def test_every_set_of_lengths_can_be_drawn(tmp_path: Path, lengths: list[int]) -> None:
    draw_chart(tmp_path, np.array(lengths), np.ones(len(lengths), np.int64))
    assert [path.name for path in tmp_path.iterdir()] == [CHART]


def test_any_name_of_a_directory_can_be_drawn_and_a_link_is_not_written_through(tmp_path: Path) -> None:
    folder = tmp_path / "50$ and x^$ \udcff\x1b[31m"
    folder.mkdir()
    (tmp_path / "victim").write_text("precious")
    for name in (CHART, f".partial-{CHART}"):
        (folder / name).symlink_to(tmp_path / "victim")
    draw_chart(folder, np.array([3]), np.ones(1, np.int64))
    assert (tmp_path / "victim").read_text() == "precious"
    assert (folder / CHART).read_bytes().startswith(b"\x89PNG")
