"""Only training files of a dataset are read as documents; all other files are reported."""

from pathlib import Path

import pytest

from common.errors import BadInput
from common.remote_files import RemoteFile
from tests.tokens.documents.test_sources import resolve
from tokens.documents.selection import select, split_of_source

CARD = "---\nlicense: mit\n---\n# A dataset\n"


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(CARD if name.endswith("README.md") else '{"text": "a"}\n')
    return folder


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (("train.jsonl", "test.jsonl", "README.md"), "train.jsonl,"),
        (
            ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test.parquet"),
            "data/train-0000*.parquet',",
        ),
        (("train/a.jsonl", "validation/a.jsonl"), "train,"),
        (("c4-train.0.json.gz", "c4-train.1.json.gz", "c4-validation.0.json.gz"), "c4-train.*.json.gz',"),
        (("dev.json", "part.json"), "dev.json,"),
        (("wiki.train.txt", "wiki.valid.txt"), "wiki.train.txt,"),
        (("train/pos/1.txt", "test/pos/1.txt"), "train,"),
        (("train/a.py", "eval/a.jsonl", "train/b.py"), "train,"),
        (("text.jsonl", "eval/a.jsonl"), "eval,"),
        (("train.jsonl", "heldout.jsonl"), "train.jsonl,"),
        (("a-train.jsonl", "a-held-out.jsonl"), "a-train.jsonl,"),
        (("trainset.jsonl", "testset.jsonl"), "trainset.jsonl,"),
        (("train/a.jsonl", "validate/a.jsonl"), "train,"),
    ],
)
def test_an_error_about_several_splits_suggests_a_path(tmp_path: Path, names: tuple[str, ...], advice: str) -> None:
    folder = fill(tmp_path / "ds", *names)
    with pytest.raises(BadInput) as refused:
        resolve(folder)
    message = str(refused.value)
    assert message.startswith(f"{folder}: contains several splits: ") and advice in message
    suggested = message.partition("such as ")[2].partition(", or ")[0].strip("'")
    paths, _ = resolve(suggested)
    assert paths[0] and len({split_of_source(str(Path(path).relative_to(folder))) for path in paths[0]}) == 1


def test_a_glob_over_several_splits_is_refused(tmp_path: Path) -> None:
    folder = fill(tmp_path / "test", "train.jsonl", "test.jsonl")
    with pytest.raises(BadInput, match=r"contains several splits: train in 1 file, test in 1; name one of them"):
        resolve(f"{folder}/*.jsonl")
    assert resolve(f"{folder}/tr*.jsonl") == ([[f"{folder}/train.jsonl"]], [])


def test_splits_named_separately_are_reported(tmp_path: Path) -> None:
    folder = fill(tmp_path, "train.jsonl", "test.jsonl", "validation.jsonl")
    paths, notes = resolve(folder / "train.jsonl", folder / "test.jsonl")
    assert paths == [[f"{folder}/train.jsonl"], [f"{folder}/test.jsonl"]]
    assert notes == ["NOTE: the sources contain several splits, and all are read: train in 1 file, test in 1"]


def test_a_dataset_card_is_reported_and_skipped(tmp_path: Path) -> None:
    names = ("README.md", "ds.py", "dataset_infos.json", "data/train.jsonl", ".cache/x.json", "a.csv")
    folder = fill(tmp_path / "ds", *names)
    paths, notes = resolve(folder)
    assert paths == [[f"{folder}/data/train.jsonl"]]
    for name in names:
        assert (f"{folder}/{name}" in "\n".join(notes)) == (name != "data/train.jsonl"), name
    for name in ("data.csv", "data.zip", "tokens.bin"):
        folder = fill(tmp_path / name, "README.md", name)
        with pytest.raises(BadInput, match="the folder has no documents"):
            resolve(folder)


def test_documentation_is_read_completely(tmp_path: Path) -> None:
    names = ("README.md", "a.py", "docs/evaluation.md", "docs/training.md", "test/test_a.py", "tests/b.py", "train.py")
    folder = tmp_path / "project"
    fill(folder, *names)
    (folder / "README.md").write_text("# A project\n")
    assert resolve(folder) == ([sorted(f"{folder}/{name}" for name in names)], [])
    assert resolve(folder / "README.md", folder / "docs")[1] == []


def test_files_without_a_split_are_reported(tmp_path: Path) -> None:
    names = ("train-0.jsonl", "train-1.jsonl", "challenge.jsonl")
    paths, notes = resolve(fill(tmp_path, *names))
    assert paths == [[f"{tmp_path}/{name}" for name in sorted(names)]]
    note = f"read along with train files: {tmp_path}/challenge.jsonl (train: {tmp_path}/train-0.jsonl and 1 more); if"
    assert len(notes) == 1 and note in notes[0]


def test_copies_in_several_formats_are_reported(tmp_path: Path) -> None:
    _, notes = resolve(fill(tmp_path, "a.jsonl", "a.jsonl.gz", "b.jsonl"))
    assert len(notes) == 1 and f"that differ only in format are all read: {tmp_path}/a.jsonl and 1 more; if" in notes[0]
    assert resolve(fill(tmp_path / "other", "a.jsonl", "b.jsonl.gz", "c/a.jsonl"))[1] == []


def test_a_mixture_of_records_and_texts_is_reported(tmp_path: Path) -> None:
    _, notes = resolve(fill(tmp_path, "a.jsonl", "b.txt", "c.txt"))
    kinds = f"1 with records and 2 with text ({tmp_path}/b.txt and 1 more)"
    assert notes == [f"NOTE: {tmp_path}: contains files with records and files with text, and all are read: {kinds}"]


def test_every_file_is_either_read_or_left_out() -> None:
    names = ["a.txt", "b.TXT", ".c.txt", "d/.e/f.py", "g.bin", "h", "i.json.zst", "dataset_info.json", "LICENSE.md"]
    selection = select("x", names)
    left_out = [name for kind in selection.left_out.values() for name in kind]
    assert sorted([*selection.documents, *left_out]) == sorted(names)
    assert selection.documents == ["a.txt", "i.json.zst"]


def test_token_ids_among_documents_are_recognized(tmp_path: Path) -> None:
    folder = fill(tmp_path / "mixed", "a.txt", "train.bin")
    with pytest.raises(BadInput, match=r"train\.bin: contains token ids, not documents; name the text from which they"):
        resolve(folder / "train.bin")
    paths, notes = resolve(folder)
    assert paths == [[f"{folder}/a.txt"]]
    assert notes == [f"NOTE: {folder}: files of token ids, which contain no text, are left out: {folder}/train.bin"]


def test_a_bucket_prefix_is_selected_like_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["README.md", "data/train-0.jsonl", "data/train-1.jsonl", "t/plan.json", "t/ledger.jsonl", "x.png"]

    def find(name: str) -> dict[str, RemoteFile]:
        return {f"s3://b/ds/{path}": RemoteFile(f"s3://b/ds/{path}", 1, "tag") for path in listed}

    monkeypatch.setattr("tokens.documents.sources.find_remote", find)
    paths, notes = resolve("s3://b/ds")
    assert paths == [["s3://b/ds/data/train-0.jsonl", "s3://b/ds/data/train-1.jsonl"]]
    assert notes == [
        "NOTE: s3://b/ds: cards and licenses are left out: s3://b/ds/README.md",
        "NOTE: s3://b/ds: files of other kinds are left out: s3://b/ds/t/ and 1 more",
    ]
    listed.append("data/test.jsonl")
    with pytest.raises(
        BadInput, match=r"train in 2 files, test in 1; name one of them, such as 's3://b/ds/data/train-\*"
    ):
        resolve("s3://b/ds/")
