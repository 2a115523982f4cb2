"""Token statistics equal a simple count over lists of documents."""

import random
import re
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from safetensors.numpy import save_file

from common.errors import BadInput
from common.line_chart import LineChart, png
from common.text import counted
from tests.tokens.gpt2 import tiktokens
from tests.tokens.preparing import PREPARE, jsonl, run, succeed, write
from tokens.format.token_file import open_split
from tokens.stats import stats
from tokens.stats.stats import CHART, draw_chart

END = 50256


def save(directory: Path, dtype: type = np.uint16, end: int = END, **splits: list[list[int]]) -> Path:
    """Write the documents of splits to token files, without a manifest."""
    directory.mkdir(exist_ok=True)
    for split, documents in splits.items():
        ids = [token for document in documents for token in [*document, end]]
        save_file({"tokens": np.array(ids, dtype)}, directory / f"{split}.safetensors")
    return directory


def random_documents(count: int, seed: int) -> list[list[int]]:
    """Return documents of 0 to 299 random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(1000) for _ in range(draw.randrange(300))] for _ in range(count)]


def numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", line)]


@pytest.mark.parametrize("block", [7, 1000, 1 << 19])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_statistics_equal_a_plain_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, dtype: type
) -> None:
    monkeypatch.setattr(stats, "BLOCK_TOKENS", block)
    train, validation = random_documents(200, 0), random_documents(50, 1)
    train += [train[3], train[5], train[3], []]
    validation += [train[7], train[3], train[3]]
    lines = stats.stats(save(tmp_path / "out", dtype, train=train, validation=validation))
    lengths = sorted(len(document) for document in train + validation)
    tokens = sum(lengths) + len(lengths)
    assert numbers(lines[0].split(":", 1)[1]) == [len(lengths), tokens, len(lengths), END]
    assert numbers(lines[1]) == [round(sum(lengths) / len(lengths), 1), lengths[(len(lengths) + 1) // 2 - 1]]
    percentiles = [lengths[-(-len(lengths) * percent // 100) - 1] for percent in (5, 25, 75, 95, 99)]
    assert [numbers(part)[1] for part in lines[2].split(";")[0].split(", ")] == percentiles
    assert numbers(lines[2].split(";")[1]) == [lengths[0], lengths[-1]]
    for split, documents in (("train", train), ("validation", validation)):
        distinct = {tuple(document) for document in documents}
        copies = len(documents) - len(distinct)
        assert any(f"{counted(copies, 'document')} of {split} (" in line and "copies" in line for line in lines)
    both = sum(document in train for document in validation)
    contamination = rf"CONTAMINATION +{both} documents? of validation .* also in train"
    assert any(re.search(contamination, line) for line in lines)


def test_the_histogram_counts_every_document_and_token(tmp_path: Path) -> None:
    documents = [[1] * length for length in (0, 1, 2, 3, 4, 1000, 70_000)]
    lines = stats.stats(save(tmp_path / "out", train=documents))
    rows = [match for line in lines if (match := re.match(r"(.{25})  +([\d,]+)  +[\d.]+%", line))]
    histogram = {row[1].strip(): int(row[2]) for row in rows if int(row[2])}
    assert histogram == {"0": 1, "1": 1, "2 to 3": 2, "4 to 7": 1, "512 to 1,023": 1, "65,536 to 131,071": 1}


def test_stats_use_the_manifest_of_a_prepared_directory(tmp_path: Path) -> None:
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ["ab", "ö", "", "ab"] * 10), validation_fraction=0.1)
    done = succeed(PREPARE, "stats", tmp_path / "out")
    assert "40 documents, 100 tokens, 40 of them end-of-text 256" in done.stdout
    assert "bytes per token      1.00" in done.stdout
    assert "CONTAMINATION        4 documents of validation (100.00%) also in train" in done.stdout
    assert (tmp_path / "out" / CHART).read_bytes().startswith(b"\x89PNG")
    assert f"drawn in {tmp_path / 'out' / CHART}" in done.stdout
    succeed(PREPARE, "verify", tmp_path / "out")


def test_bytes_per_token_are_compared_with_gpt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"Zeile {number}: grün und größer\n" * 9 for number in range(50)]
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", texts))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    [line] = [line for line in stats.stats(tmp_path / "out") if "versus GPT-2" in line]
    assert "not compared: tokenizer gpt2: its ranks are" in line and line.endswith("to a folder with cached ranks")
    loaded = tiktokens()
    monkeypatch.setattr(stats, "load_tokenizer", lambda name: loaded)
    [line] = [line for line in stats.stats(tmp_path / "out") if "versus GPT-2" in line]
    size = sum(len(text.encode()) for text in texts)
    gpt2 = size / sum(len(loaded.encode(text)) for text in texts)
    assert f"1.00 bytes per token; GPT-2 has {gpt2:.2f} on the same {size:,} bytes of text" in line
    monkeypatch.setattr(stats, "recorded_tokenizer", lambda record, directory: loaded)
    assert not any("versus GPT-2" in line for line in stats.stats(tmp_path / "out"))


def test_stats_need_tokens_and_the_right_end_of_text(tmp_path: Path) -> None:
    save(tmp_path / "out", end=99, train=[[1, 2], [3]])
    save(tmp_path / "two", np.uint16, train=[[1, 2], [3]])
    save(tmp_path / "two", np.uint32, validation=[[4], [1, 2]])  # ids of another type
    assert any("CONTAMINATION        1 document" in line for line in stats.stats(tmp_path / "two"))
    with pytest.raises(BadInput, match=r"the end-of-text id 50256 does not occur; pass the right one"):
        stats.stats(tmp_path / "out")
    done = run(PREPARE, "stats", tmp_path / "out", "--end-of-text", "99")
    assert "2 documents, 5 tokens" in done.stdout
    with pytest.raises(BadInput, match=r"no train\.safetensors"):
        stats.stats(tmp_path)


@pytest.mark.slow
def test_memory_is_eight_bytes_per_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "BLOCK_TOKENS", 1 << 14)
    peaks = []
    for count in (1 << 15, 1 << 18):
        tokens = np.full((count, 5), END, np.uint16)
        tokens[:, :4] = np.random.default_rng(0).integers(0, 50_000, (count, 4))
        (tmp_path / str(count)).mkdir()
        save_file({"tokens": tokens.reshape(-1)}, tmp_path / str(count) / "train.safetensors")
        stream = open_split(tmp_path / str(count), "train")
        tracemalloc.start()
        hashes, _ = stats.read_split(stream, END, np.dtype("<u2"), Counter())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(hashes) == count
    assert (peaks[1] - peaks[0]) / ((1 << 18) - (1 << 15)) < 10, peaks


def test_a_chart_handles_odd_names_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "50$ and x^$ \udcff\x1b[31m"
    folder.mkdir()
    (tmp_path / "victim").write_text("precious")
    for name in (CHART, f".partial-{CHART}"):
        (folder / name).symlink_to(tmp_path / "victim")
    with pytest.raises(BadInput, match=r"is not a chart of prepare_data.py stats"):
        draw_chart(folder, np.ones(1, np.int64), np.ones(1, np.int64))
    (folder / CHART).unlink()
    charts_drawn: list[LineChart] = []

    def draw(charts: list[LineChart], title: str) -> bytes:
        charts_drawn.extend(charts)
        return png(charts, title)

    monkeypatch.setattr(stats, "png", draw)
    for lengths in ([0], [0, 1], [5], [700_000], [1, 3, 70_000]):
        draw_chart(folder, np.array(lengths), np.ones(len(lengths), np.int64))
    assert [chart.lines[0].y[1::2].sum() for chart in charts_drawn] == [0, 1, 1, 1, 3]  # non-empty documents
    assert [mark.text for mark in charts_drawn[-1].marks] == ["median 3", "longest 70,000"]
    assert (tmp_path / "victim").read_text() == "precious"
    assert (folder / CHART).read_bytes().startswith(b"\x89PNG")


def test_splits_with_different_types_can_be_compared(tmp_path: Path) -> None:
    save(tmp_path / "out", np.uint16, train=[[1, 2], [3]])
    save(tmp_path / "out", np.uint32, validation=[[4], [1, 2]])
    assert any(re.search("CONTAMINATION +1 document of validation", line) for line in stats.stats(tmp_path / "out"))


@pytest.mark.parametrize("lengths", [[0], [0, 1], [1], [5], [1, 2, 3], [700_000]])
def test_any_document_lengths_can_be_drawn(tmp_path: Path, lengths: list[int]) -> None:
    draw_chart(tmp_path, np.array(lengths), np.ones(len(lengths), np.int64))
    assert [path.name for path in tmp_path.iterdir()] == [CHART]


def test_a_users_picture_is_not_overwritten(tmp_path: Path) -> None:
    directory = save(tmp_path / "out", train=[[1, 2], [3]])
    (directory / CHART).write_bytes(b"a picture of the user")
    last_line = stats.stats(directory)[-1]
    assert last_line.startswith(f"not drawn: {directory / CHART}: is not a chart of prepare_data.py stats")
    assert "(21 bytes); move it away" in last_line
    assert (directory / CHART).read_bytes() == b"a picture of the user"
    (directory / CHART).unlink()
    for _ in range(2):  # our chart is replaced
        assert stats.stats(directory)[-1] == f"drawn in {directory / CHART}"
