"""Held-out splits: selected by the hash of a document's text, or cut from the end of the train stream."""

import random
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.tokens.preparing import files_of, jsonl, texts_of, tokens_of, write
from tokens.format.manifest import read_manifest
from tokens.prepare.verify import verify


@pytest.mark.parametrize("unit_bytes", [30, 1 << 24])
def test_a_tail_split_holds_out_the_last_documents(tmp_path: Path, unit_bytes: int) -> None:
    source = jsonl(tmp_path / "a.jsonl", [str(number) for number in range(10)])
    write(tmp_path / "out", source, validation_fraction=0.2, test_fraction=0.1, unit_bytes=unit_bytes)
    splits = {split: "".join(texts_of(tmp_path / "out", split)) for split in ("train", "validation", "test")}
    assert splits == {"train": "0123456", "validation": "78", "test": "9"}


def test_a_single_document_is_cut_by_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 99)
    for kind in ("tail", "hash"):
        write(tmp_path / kind, tmp_path / "a.txt", split=kind, validation_fraction=0.1, test_fraction=0.05)
        lengths = [len(tokens_of(tmp_path / kind, split)) for split in ("train", "validation", "test")]
        assert lengths == [85, 10, 5]


def shares_of(directory: Path) -> dict[str, float]:
    """Return each split's share of all tokens."""
    files = read_manifest(directory).files
    return {
        name.partition(".")[0]: entry.tokens / sum(file_entry.tokens for file_entry in files.values())
        for name, entry in files.items()
    }


@pytest.mark.parametrize("split", ["tail", "hash"])
@pytest.mark.parametrize(
    "lengths",
    [[300_000, 15], [15, 300_000], [5000, 5000], [100] * 30 + [9000], [9000] + [100] * 30, [50_000] + [9] * 400],
)
def test_a_held_out_share_is_close_to_the_request(tmp_path: Path, lengths: list[int], split: str) -> None:
    texts = ["", *(f"{number} ".ljust(length, "x") for number, length in enumerate(lengths)), ""]
    source, shares = jsonl(tmp_path / "a.jsonl", texts), {"validation": 0.1, "test": 0.02}
    for seed in range(3):
        out = tmp_path / str(seed)
        fractions = {f"{name}_fraction": share for name, share in shares.items()}
        try:
            manifest = write(out, source, split=split, split_seed=seed, unit_bytes=2000, **fractions)
        except BadInput as error:  # if the hash selects unusable splits, the error gives advice
            assert split == "hash" and len(lengths) == 2 and "pass --split tail" in str(error)
            continue
        for name, share in shares.items():
            assert share / 2 <= shares_of(out)[name] <= share * 2
        splits = ("train", "validation", "test")
        assert sorted(token for name in splits for token in tokens_of(out, name)) == sorted(
            token for text in texts for token in [*text.encode(), 256]
        )
        assert verify(str(out))
        if split == "hash":
            assert manifest.split.from_tail or manifest.split.shortened or tokens_of(out, "validation")[-1] == 256


def test_too_few_tokens_for_a_share_are_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["", "a", "b", "c", "d"])
    with pytest.raises(
        BadInput,
        match=r"a single token is already 11\.1% of the 9 tokens; pass a --validation-fraction of 0 or .* 0\.112",
    ):
        write(tmp_path / "out", source, split="tail", validation_fraction=0.01)
    write(tmp_path / "out", source, split="tail", validation_fraction=0.112)


@pytest.mark.parametrize(("seed", "kind"), [(0, "from_tail"), (21, "shortened")])
def test_a_corrected_share_survives_an_interruption(
    tmp_path: Path, seed: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["x" * 9000, *(str(number) * 50 for number in range(20))])
    options = {"split": "hash", "split_seed": seed, "validation_fraction": 0.1, "unit_bytes": 300}
    manifest = write(tmp_path / "whole", source, **options)
    assert getattr(manifest.split, kind) == ["validation"]
    for point in ("tail copied", "cut noted", "tail cut off", "headers written", "file named"):

        def interrupt(reached: str, point: str = point) -> None:
            if reached == point:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("tokens.prepare.token_writer.reached", interrupt)
            write(tmp_path / point, source, **options)
        assert getattr(write(tmp_path / point, source, **options).split, kind) == ["validation"]
        assert files_of(tmp_path / point) == files_of(tmp_path / "whole")


def test_empty_documents_do_not_count_in_splits(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("x" * 1000)
    (tmp_path / "texts" / "empty.txt").write_text("")
    for kind in ("hash", "tail"):
        write(tmp_path / kind, tmp_path / "texts", split=kind, validation_fraction=0.01)
        assert tokens_of(tmp_path / kind, "validation") == [*b"x" * 9, 256, 256]
    source = jsonl(tmp_path / "a.jsonl", ["", "a", "", "b", "", "c", "", "d", ""])
    write(tmp_path / "out", source, validation_fraction=0.25, test_fraction=0.25)
    splits = [texts_of(tmp_path / "out", split) for split in ("train", "validation", "test")]
    assert splits == [["", "a", "", "b", ""], ["c", ""], ["d", ""]]


def test_only_a_documents_hash_decides_its_split(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(2000)]
    rule = {"split": "hash", "validation_fraction": 0.05, "test_fraction": 0.02}
    write(tmp_path / "first", jsonl(tmp_path / "a.jsonl", texts), **rule)
    other_texts = [f"other {number}" for number in range(500)]
    shuffled = random.Random(0).sample(texts + other_texts + texts[:300], len(texts) + len(other_texts) + 300)
    write(tmp_path / "second", jsonl(tmp_path / "b.jsonl", shuffled), unit_bytes=999, **rule)
    for split, share in (("train", 0.93), ("validation", 0.05), ("test", 0.02)):
        first, second = (texts_of(tmp_path / name, split) for name in ("first", "second"))
        assert len(first) == pytest.approx(share * len(texts), rel=0.4)
        assert {text for text in second if text in set(texts)} == set(first)
    write(tmp_path / "third", tmp_path / "a.jsonl", split_seed=1, **rule)
    assert texts_of(tmp_path / "third", "validation") != texts_of(tmp_path / "first", "validation")
