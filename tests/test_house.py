"""The house rules that a machine can check: which way imports run, what documents say, what entry scripts answer."""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest

from tests.conftest import ROOT
from training.config.train_config import TrainConfig

MAY_IMPORT = {
    "common": {"common"},
    "model": {"model", "common"},
    "tokens": {"tokens", "common"},
    "training": {"training", "model", "tokens", "common"},
    "evaluation": {"evaluation", "training", "model", "tokens", "common"},
}
ENTRY_SCRIPTS = ("train.py", "find_batch_size.py", "prepare_data.py", "evaluate.py")
ROOMS = {*MAY_IMPORT, *(script.removesuffix(".py") for script in ENTRY_SCRIPTS)}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("room", ["common", "model", "tokens", "training", "evaluation"])
def test_imports_run_one_way(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        named = imports(path)
        used = {name.partition(".")[0] for name in named} & ROOMS
        assert used <= MAY_IMPORT[room], path
        if room in ("model", "tokens", "evaluation"):
            assert not any(name.startswith("torch.distributed") for name in named), path


@pytest.mark.parametrize("script", ENTRY_SCRIPTS)
def test_help_is_quick_and_usage_errors_exit_with_2(script: str) -> None:
    began = time.monotonic()
    shown = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "examples:" in shown.stdout
    assert "Exit status: 0 done" in shown.stdout
    heavy = subprocess.run(
        [sys.executable, "-X", "importtime", script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not re.search(r"\| +(torch|numpy|matplotlib|tiktoken|datasets)$", heavy.stderr, re.MULTILINE)
    wrong = subprocess.run(
        [sys.executable, script, "--nonsense"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert time.monotonic() - began < 30


def test_training_needs_none_of_the_optional_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('datasets', 'pyarrow', 'zstandard', 'huggingface_hub', 'tiktoken', 'transformers', 'pydantic'):\n"
        "    sys.modules[name] = None\n"
        "import training.build, evaluation.smoke.smoke, evaluation.shared.load, tokens.documents.reader\n"
        "import tokens.prepare.writer, tokens.hub.download"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_key_of_train_json_is_documented_with_its_default() -> None:
    page = (ROOT / "docs" / "run-directory.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", page, re.MULTILINE))
    for name, field in attrs.fields_dict(TrainConfig).items():
        default = "required" if field.default is attrs.NOTHING else {None: "null"}.get(field.default, field.default)
        documented = rows[name].strip().strip('"')
        assert documented == str(default).lower() or float(documented) == float(str(default)), name


def test_the_readmes_file_tree_is_the_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = readme.split("## What is where")[1].split("```")[1]
    named, room = set(), ""
    for line in tree.splitlines():
        if line.strip() and not line.startswith("#"):
            name = line.split()[0]
            named.add(room + name if line.startswith(" ") else name)
            room = room if line.startswith(" ") else name
    whole = ("tests/",)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    code = {
        path
        for path in tracked
        if (
            path.endswith(".py")
            and not path.startswith(whole)
            and not path.endswith(("__init__.py", "/command.py", "/shared/arguments.py"))
        )
        or path in ("Makefile", "setup_lambda.sh", "requirements.txt", "requirements-test.txt")
        or path.startswith("docs/")
    }
    assert named >= code, f"not in the README: {sorted(code - named)}"
    for name in named:
        assert (ROOT / name).exists(), f"in the README, not in the tree: {name}"
