"""Token set: the order of the files that a run reads."""

from pathlib import Path

import numpy as np

from tokens.format.token_file import open_split
from training.data.open_tokens import as_begun


def test_a_run_keeps_the_order_of_the_files_that_it_began_with(tmp_path: Path) -> None:
    for number in (9, 10):
        header = np.array([20240520, 1, 10], dtype=np.int32).tobytes().ljust(1024, b"\0")  # llm.c's
        tokens = np.full(10, number, dtype=np.uint16).tobytes()
        (tmp_path / f"fineweb_train_{number}.bin").write_bytes(header + tokens)
    stream = open_split(tmp_path, "train")
    assert [file.path.name for file in stream.files] == ["fineweb_train_9.bin", "fineweb_train_10.bin"]
    begun = as_begun(stream, [["fineweb_train_10.bin", "fineweb_train_9.bin"]])
    assert [int(begun.read(start, 1)[0]) for start in (0, 10)] == [10, 9]
    for other in ([], [["fineweb_train_10.bin"]], [["fineweb_train_9.bin", "fineweb_train_10.bin"]]):
        assert as_begun(stream, other) is stream
