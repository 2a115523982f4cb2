"""In-place edit of train.json: one number changes; links, mode and line ends stay."""

from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import BadInput
from training.batch_finder.edit_json import check_editable, write_microbatch
from training.config.train_config import load_run


def test_writing_keeps_a_link_the_mode_and_ends_of_lines(make_run: Callable[..., Path]) -> None:
    directory = make_run()
    path, file = directory / "train.json", directory / "elsewhere.json"
    text = path.read_bytes().replace(b", ", b",\r\n")
    path.unlink()
    path.symlink_to(file.name)
    file.write_bytes(text)
    file.chmod(0o600)
    run = load_run(directory, [])
    check_editable(run.train, [])
    assert write_microbatch(path, 4)
    assert path.is_symlink() and file.stat().st_mode & 0o777 == 0o600
    assert file.read_bytes() == text.replace(b'"microbatch_size": 2', b'"microbatch_size": 4')
    file.write_bytes(text.replace(b'"microbatch_size"', b'"microbatch\\u005fsize"'))
    with pytest.raises(BadInput, match=r'wanted the key spelt "microbatch_size"'):
        check_editable(load_run(directory, []).train, [])
