"""Compressed JSON lines: bounded memory, and damage counted where it begins."""

import gzip
import json
import random
import resource
from pathlib import Path

import pytest
import zstandard

from tests.tokens.documents.reading import GOOD, flipped, read
from tokens.documents import compressed
from tokens.documents.text_file import LONGEST_LINE


@pytest.mark.slow
def test_a_line_that_was_packed_a_thousandfold_is_left_out_in_linear_time_and_constant_memory(tmp_path: Path) -> None:
    # In quadratic time, 15 s for a fifth of these bytes, it would run into the limit for hangs.
    with (tmp_path / "a.jsonl.zst").open("wb") as file:
        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as writer:
            for _ in range(1000):
                writer.write(b"x" * (1 << 20))
        file.write(zstandard.compress(b"\n" + GOOD))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pieces, reader = read(tmp_path / "a.jsonl.zst")
    assert ([piece.text for piece in pieces], len(reader.problems.first)) == (["fine"], 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3 * LONGEST_LINE / 1024


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_damage_in_a_compressed_file_costs_what_lies_behind_it(tmp_path: Path, kind: str) -> None:
    draw = random.Random(0)
    lines = b"".join(json.dumps({"text": draw.randbytes(200).hex()}).encode() + b"\n" for _ in range(3000))
    compress = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}[kind]
    data = compress(lines)
    place = 2 * len(data) // 3
    for damaged, behind in ((data[:place], 0), (flipped(data, place), len(data) - place)):
        (tmp_path / f"a.jsonl.{kind}").write_bytes(damaged)
        pieces, reader = read(tmp_path / f"a.jsonl.{kind}")
        assert len(pieces) > 1000
        damage = reader.problems.first[-1]
        assert (damage.kind, damage.documents) == ("damaged file", 1)
        if "garbled" not in damage.detail:  # it was found where it is
            assert len(pieces) <= 2000
            assert behind <= damage.lost_bytes <= behind + 2 * compressed.PACKED_BYTES
            assert damage.lost_bytes > 1


def test_a_wrong_checksum_says_that_the_lines_before_it_may_be_garbled(tmp_path: Path) -> None:
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(GOOD * 9)
    for name, data in (("a.jsonl.gz", flipped(gzip.compress(GOOD * 9), -8)), ("a.jsonl.zst", flipped(checked, -1))):
        (tmp_path / name).write_bytes(data)
        _, reader = read(tmp_path / name)
        [damage] = reader.problems.first
        assert damage.kind == "damaged file"
        assert damage.detail.endswith("lines before it may be garbled")
