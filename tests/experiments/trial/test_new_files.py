"""New files belong to a candidate only if a program imports or names them."""

from pathlib import Path

import pytest

from experiments.trial.new_files import needed_files

TRACKED = {
    "train.py": "from model import gpt\n",
    "model/gpt.py": "import math\n",
    "tests/test_all.py": "import helper\nopen('answers.json')\n",
}


@pytest.mark.parametrize(
    ("program", "source", "new"),
    [
        ("train.py", "import extra", "extra.py"),
        ("train.py", "import math", "math.py"),  # this file would hide the library
        ("train.py", "import extra.deep", "extra/__init__.py"),
        ("model/gpt.py", "from . import extra", "model/extra.py"),
        ("model/gpt.py", "from .extra import value", "model/extra.py"),
        ("model/gpt.py", "from model import extra", "model/extra.py"),
        ("train.py", "importlib.import_module('model.extra')", "model/extra.py"),
        ("model/gpt.py", "Path(__file__).with_name('table.json')", "model/data/table.json"),
        ("train.py", "open('words.txt')", "words.txt"),
        ("model/gpt.py", "open('lists/words.txt')", "lists/words.txt"),
        ("train.py", "not Python: extra", "extra.py"),
    ],
)
def test_a_new_file_that_is_named_is_needed(tmp_path: Path, program: str, source: str, new: str) -> None:
    assert write_and_choose(tmp_path, TRACKED | {program: source}, {new: ""}) == [new]


@pytest.mark.parametrize(
    "new",
    ["extra.py", "notes.txt", "helper.py", "answers.json", "runs/a/train.json", "other/gpt.py", "gpt.py", "folder/"],
)
def test_a_new_file_that_nothing_names_is_not_needed(tmp_path: Path, new: str) -> None:
    assert write_and_choose(tmp_path, TRACKED, {new: ""}) == []


def test_new_files_may_need_other_new_files(tmp_path: Path) -> None:
    new = {"model/deep.py": "open('model/deep.json')", "model/deep.json": "", "model/extra.py": "from . import deep"}
    assert write_and_choose(tmp_path, TRACKED, new) == []
    tracked = TRACKED | {"train.py": "from model.extra import value"}
    assert sorted(write_and_choose(tmp_path, tracked, new)) == sorted(new)


def write_and_choose(root: Path, tracked: dict[str, str], new: dict[str, str]) -> list[str]:
    """Write the files, and return the new files that are needed."""
    for name, source in (tracked | new).items():
        if not name.endswith("/"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(source)
    return needed_files(root, [*tracked], [*new])
