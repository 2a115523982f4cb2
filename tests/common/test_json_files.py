"""Untrusted JSON is limited in size, invalid JSON is refused in one line, and logs do not lose lines."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import BadInput
from common.json_files import DEPTH, JsonLog, parse_json, read_every_line, read_json, read_json_lines

NESTED = b'{"a": ' * 100_000
TOO_DEEP = b'{"a": ' * (DEPTH + 1) + b"1" + b"}" * (DEPTH + 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "wanted an object"),
        (NESTED, "nested deeper than 100"),
        (TOO_DEEP, "nested deeper than 100"),
        (b'{"a": 1, "a": 2}', "key 'a' is given twice"),
        ('{"a": "é"}'.encode("latin-1"), "not UTF-8 at byte 7"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "integer string conversion"),
    ],
)
def test_invalid_json_is_reported_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message) as raised:
        read_json(path, advice="write it again")
    assert str(raised.value).startswith(f"{path}: ")
    assert str(raised.value).endswith("; write it again")
    assert len(str(raised.value)) < 400 and "\n" not in str(raised.value)


def test_nesting_up_to_the_limit_and_a_byte_order_mark_are_read() -> None:
    text = b"\xef\xbb\xbf" + b'{"a": ' * (DEPTH - 1) + b"{}" + b"}" * (DEPTH - 1)
    assert "a" in parse_json(text)


def test_many_keys_are_read_in_linear_time() -> None:
    keys = 200_000  # a quadratic search for duplicates would take hours
    assert len(parse_json(json.dumps(dict.fromkeys(map(str, range(keys)), 0)))) == keys


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        Path.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_text(json.dumps({"a": "b" * 1000})),
        # Root may read all files, so if the test runs as root, the link points to itself.
        lambda path: path.symlink_to("/proc/1/mem" if os.getuid() else path),
    ],
)
def test_only_regular_files_are_read(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(path := tmp_path / "x.json")
    with pytest.raises(BadInput, match=r"x\.json: cannot be read"):
        read_json(path, most_bytes=1000)


def test_damaged_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n[1,2]\n\xff\n' + NESTED + b'\n{"a": 2}\n{"a":')
    assert read_json_lines(path).records == [{"a": 1}, {"a": 2}]
    assert len(read_json_lines(path).damaged) == 4


def test_damaged_input_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": 2}\r\n')
    assert read_every_line(path) == [{"a": 1}, {"a": 2}]
    for line in (b"[1,2]", b"\xff", NESTED, b'{"a":'):
        path.write_bytes(b'{"a": 1}\n' + line + b"\n")
        with pytest.raises(BadInput, match=r"items\.jsonl: line 2: .*; get it again$"):
            read_every_line(path, advice="get it again")


def test_the_log_starts_a_new_line_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a":')
    log = JsonLog(path)
    log.append({"a": 3})
    log.close()
    assert read_json_lines(path).records == [{"a": 1}, {"a": 3}]


def test_the_log_says_when_it_cannot_be_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "full").symlink_to("/dev/full")
    for name in ("pipe", "full", "missing/log"):
        with pytest.raises(OSError):
            JsonLog(tmp_path / name)
