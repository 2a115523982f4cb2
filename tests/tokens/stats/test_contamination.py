"""Items and held-out documents that occur in a train split are counted and shown with their positions."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import EXIT_DONE, BadInput
from common.text import printable
from tests.tokens.preparing import jsonl, write
from tests.tokens.stats.test_stats import save
from tokens.command import read_command_line
from tokens.format.token_file import open_split
from tokens.stats import stats
from tokens.stats.contamination import contamination, likeness, read_items
from tokens.tokenizer.loading import load_tokenizer

BYTES = load_tokenizer("bytes")
TEXTS = [f"document {number}: {chr(97 + number % 26) * 40} \x1b[31m" for number in range(100)]


def items(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_text_of_an_item_is_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", TEXTS))
    path = items(
        tmp_path / "items.jsonl",
        {"question": "not there", "choices": ["nowhere, and long enough", {"deep": "document 7: hhhh"}], "label": 3},
        {"text": "neither is this one of them"},
        {"text": "ument 33:"},  # fewer than 13 tokens, but the whole text occurs in train
        {"text": "ument 333"},
        {"text": "ument 7"},  # 7 tokens, but 8 with a space in front, which is enough
        {"text": "ument"},
        {"label": 3},
    )
    lines = contamination(tmp_path / "out", BYTES, (path,))
    assert lines[0] == f"  CONTAMINATION        {path}: 2 of 7 items (28.57%) share 13 tokens in a row with train"
    searched = "3 with fewer than 13 tokens were searched for as a whole"
    unsearched = "2 with fewer than 8 were not searched for"
    assert lines[1].strip() == f"{searched}, and {unsearched}"
    where = rf"{tmp_path}/out/train.safetensors, token [\d,]+: "
    assert re.fullmatch(rf"    item 1 +{where}.*\x1b\[31m<\|endoftext\|>\[document 7: h\]hhhhhhhhhh", lines[2])
    assert re.fullmatch(rf"    item 3 +{where}.*doc\[ument 33:\] hhhhhhhhh", lines[3])
    monkeypatch.setattr(stats, "_compare_with_gpt2", lambda *_: [])  # the comparison might start a download
    words = ["stats", str(tmp_path / "out"), "--against", str(path), "--against", str(path), "--near-duplicates"]
    command, options = read_command_line(words)
    assert command.run(options) == EXIT_DONE
    printed, lines = capsys.readouterr().out.splitlines(), [*map(printable, lines)]
    assert [line for line in printed if line in lines] == lines * 2
    assert any(line.startswith("  near-duplicates ") for line in printed)


def test_documents_of_held_out_splits_are_items(tmp_path: Path) -> None:
    train = [[*range(300 + at, 340 + at)] for at in range(0, 900, 40)]
    held_out = [[*range(14)], [*range(310, 323)], [1] * 9]
    save(tmp_path / "a", end=256, train=train)
    save(tmp_path / "b", end=256, train=[[5] * 20], validation=held_out, test=[train[3][2:16]])
    summaries = contamination_of(tmp_path / "a", tmp_path / "b", tmp_path / "a")
    assert summaries == {
        "b validation": "1 of 3 documents",
        "b test": "1 of 1 documents",
        "a train": "23 of 23 documents",
    }
    assert contamination_of(tmp_path / "b", tmp_path / "a") == {"a train": "0 of 23 documents"}


def contamination_of(directory: Path, *sources: Path) -> dict[str, str]:
    lines = contamination(directory, load_tokenizer("bytes"), sources)
    matches = [re.search(r"(\w+ \w+): (\d+ of \d+ \w+) \(", line) for line in lines]
    return {match[1]: match[2] for match in matches if match}


def test_unusable_sources_are_one_error_line(tmp_path: Path) -> None:
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", TEXTS))
    (tmp_path / "broken.jsonl").write_text('{"a": "b"}\n{"a": \n')
    for path, problem in ((tmp_path / "broken.jsonl", "line 2"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(BadInput, match=f"{path}: {problem}.*wanted JSON Lines of texts, or a token directory"):
            contamination(tmp_path / "out", BYTES, (path,))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BadInput, match=r"empty\.jsonl: contains no items; wanted JSON Lines"):
        contamination(tmp_path / "out", BYTES, (tmp_path / "empty.jsonl",))
    unknown = items(tmp_path / "unknown.jsonl", {"a": "a"}, {"a": "b"})
    with pytest.raises(BadInput, match=r"unknown\.jsonl: item 2: tokenizer chars"):
        read_items(unknown, load_tokenizer("chars: a"))
    with pytest.raises(BadInput, match="no train tokens"):
        contamination(save(tmp_path / "held", validation=[[1]]), BYTES, (tmp_path / "out",))


def test_a_filled_in_template_is_a_near_duplicate(tmp_path: Path) -> None:
    madlib = "Dear {}, thank you for your order of {}. It leaves our house this morning. Yours sincerely, the {} team"
    words = ["Ann", "Bob", "tea", "oil", "red", "old"]
    texts = [madlib.format(words[at], words[(at + 2) % 6], words[at - 1]) for at in range(6)] + TEXTS[:26] + ["abc"]
    write(tmp_path / "out", jsonl(tmp_path / "a.jsonl", texts))
    lines = likeness({"train": open_split(tmp_path / "out", "train")}, BYTES, 256)
    assert lines[0] == "  near-duplicates      5 documents of train (15.15%) similar to an earlier one"
    assert "93.772% of the pairs at 0.6" in lines[1]
    assert lines[2].strip() == "1 document with fewer than 5 tokens not compared"
    assert re.match(r" +similarity 0\.[6-9]\d$", lines[3])
    assert all("Dear " in line for line in lines[4:6])
