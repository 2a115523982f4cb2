"""Sources resolve to all documents below a folder, from any current folder; omitted files are reported."""

import io
import os
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from common.errors import BadInput
from common.hub_client import note_local
from tests.tokens.documents.reading import SETTINGS
from tests.tokens.preparing import texts_of, write
from tokens.documents.inputs import Input
from tokens.documents.sources import resolve_sources
from tokens.prepare.plan import make_plan


def resolve(*names: str | Path) -> tuple[list[list[str]], list[str]]:
    """Return the paths of each source, and the printed lines."""
    with redirect_stderr(io.StringIO()) as stderr:
        sources = resolve_sources([str(name) for name in names])
    return [[item.path for item in source.inputs] for source in sources], stderr.getvalue().splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    for name in ("a.txt", "sub/b.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_links_are_followed_except_in_circles(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.txt").write_text("c")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "linked.txt").symlink_to(folder / "a.txt")
    names = ("a.txt", "link/c.txt", "linked.txt", "sub/b.txt")
    twice = f"NOTE: named twice, so prepared twice: {folder}/a.txt"
    assert resolve(folder) == ([[f"{folder}/{name}" for name in names]], [twice])


def test_broken_links_and_unreadable_folders_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lost.txt").symlink_to(folder / "gone.txt")
    with pytest.raises(BadInput, match=rf"^{folder}/lost\.txt: cannot be read: No such file"):
        resolve(folder)
    (folder / "lost.txt").unlink()
    scan = os.scandir

    def refuse(path: str) -> "Iterator[os.DirEntry[str]]":
        if path.endswith("sub"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    with monkeypatch.context() as patch, pytest.raises(BadInput, match=r"sub/b\.txt: cannot be read: .* denied"):
        # The folder can be listed, but its files cannot be read.
        patch.setattr(Path, "is_file", lambda path: refuse(str(path.parent)))
        resolve(folder)
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(BadInput, match=rf"^{folder}/sub: cannot be read: Permission denied"):
        resolve(folder)


def test_token_directories_inside_a_source_are_skipped(folder: Path) -> None:
    for _ in range(2):  # the second command finds plan.json, ledger.jsonl and manifest.json of the first
        write(folder / "tokens", folder)
    assert texts_of(folder / "tokens", "train") == ["a.txt", "sub/b.txt"]
    with pytest.raises(BadInput, match=rf"{folder}/tokens: contains tokens; name a folder of documents instead"):
        resolve(folder / "tokens")
    assert resolve(folder)[1] == [f"NOTE: {folder}: files of other kinds are left out: {folder}/tokens"]
    (folder / "sub" / "plan.json").write_text('{"text": "somebody else\'s"}\n')
    assert resolve(folder)[0] == [[f"{folder}/{name}" for name in ("a.txt", "sub/b.txt", "sub/plan.json")]]


def test_a_source_cannot_be_the_output(folder: Path) -> None:
    with pytest.raises(BadInput, match=rf"{folder}: is both a source and the output; pass another --output"):
        write(folder, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "sub"]


def test_other_and_repeated_files_are_reported(folder: Path) -> None:
    _, nothing = resolve(folder)
    assert nothing == []
    [before] = resolve_sources([str(folder)])
    for name in ("z.TXT", "sub/y.txt.gz", "x.bz2", ".hidden"):
        (folder / name).write_bytes(b"")
    _, notes = resolve(folder)
    assert notes == [f"NOTE: {folder}: files of other kinds are left out: {folder}/sub/y.txt.gz and 2 more"]
    [after] = resolve_sources([str(folder)])
    assert make_plan([after], SETTINGS).fingerprint() == make_plan([before], SETTINGS).fingerprint()
    paths, notes = resolve(folder / "sub" / "b.txt", folder / "*.txt", f"{folder}/**/b.txt")
    assert paths == [[f"{folder}/sub/b.txt"], [f"{folder}/a.txt"], [f"{folder}/sub/b.txt"]]
    assert notes == [f"NOTE: named twice, so prepared twice: {folder}/sub/b.txt"]


def test_a_preparation_resumes_from_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    [source] = resolve_sources(["sub"])
    assert (source.name, source.inputs[0].path) == ("sub", f"{folder}/sub/b.txt")
    write(folder / "out", Path("sub"))
    monkeypatch.chdir(folder / "out")
    write(folder / "out", Path("../sub").resolve())
    with pytest.raises(BadInput, match="its sources were named differently, or in another order"):
        write(folder / "out", Path("../sub"), sources=[f"{folder}/sub/b.txt"] * 2)


def test_the_standard_library_has_a_fixed_order() -> None:
    first, again = resolve_sources(["stdlib", "stdlib"])
    assert first.inputs == again.inputs
    names = [Path(item.path).name for item in first.inputs]
    assert "argparse.py" in names
    assert names != sorted(names)
    folders = [Path(item.path).parts for item in first.inputs]
    assert not any("site-packages" in parts or "test" in parts for parts in folders)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.docx", r"x\.docx: unknown kind of document; wanted a name ending in \.txt, \.md"),
        ("train.bin", r"train\.bin: contains token ids, not documents"),
        ("*.txt", "no such file, folder or glob"),
        ("empty", "the folder has no documents"),
    ],
)
def test_sources_without_documents_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    for file_name in ("x.docx", "train.bin"):
        (tmp_path / file_name).write_bytes(b"")
    with pytest.raises(BadInput, match=message):
        resolve_sources([str(tmp_path / name)])


def test_names_are_sorted_by_their_numbers(tmp_path: Path) -> None:
    names = ["a-x.txt", "a.txt", "a0x.txt", "a9.txt", "a010.txt", "a10.txt", "a100.txt", "b2/9.txt", "b10/1.txt"]
    for name in reversed(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert resolve(tmp_path) == ([[f"{tmp_path}/{name}" for name in names]], [])


def test_a_folder_with_a_datasets_name_is_noted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{folder.parent.name}/texts"
    note = f"NOTE: {name}: using the local path of this name; for a dataset on the hub, write hf:{name}"
    monkeypatch.chdir(folder.parent.parent)
    note_local.cache_clear()
    assert resolve(name)[1] == []  # a user's own texts
    (folder / "README.md").write_text("---\nlicense: mit\n---\nA dataset.\n")  # a copy of a dataset of the hub
    assert note in resolve(name)[1]
    note_local.cache_clear()
    assert note not in resolve(f"./{name}")[1]
    for file in (*folder.rglob("*.txt"), *folder.rglob("*.md")):
        file.unlink()
    with pytest.raises(BadInput):
        resolve_sources([name])
    assert note in capsys.readouterr().err


@pytest.mark.parametrize(("first", "again"), [("owner/words", "hf:owner/words"), ("hf:owner/words", "owner/words")])
def test_the_hf_prefix_does_not_change_the_commit(
    first: str, again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commits = list[str | None]()

    def hub(name: str, commit: str | None) -> list[Input]:
        commits.append(commit)
        return [Input(f"hf://datasets/owner/words@{'0' * 40}/a.jsonl", 5, "blob_id 1")]

    monkeypatch.setattr("tokens.documents.sources._hub_dataset", hub)
    resolve_sources([again], resolve_sources([first]))
    assert commits == [None, "0" * 40]
