"""The house rules that a machine can check: links, the direction of imports, and the help of entry scripts."""

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest

import evaluation.command_line
import experiments.command
import reporting.command
import tokens.command
import train
import training.command
from tests import launch
from tests.launch import ROOT, execute

MAY_IMPORT = {
    "common": {"common"},
    "model": {"model", "common"},
    "tokens": {"tokens", "common"},
    "training": {"training", "model", "tokens", "common"},
    "evaluation": {"evaluation", "training", "model", "tokens", "common"},
    "reporting": {"reporting", "evaluation", "training", "model", "tokens", "common"},
    "experiments": {"experiments", "evaluation", "training", "model", "tokens", "common"},
}
ENTRY_SCRIPTS = ("train.py", "find_batch_size.py", "prepare_data.py", "evaluate.py", "report.py", "experiment.py")
ROOMS = {*MAY_IMPORT, *(script.removesuffix(".py") for script in ENTRY_SCRIPTS)}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("room", list(MAY_IMPORT))
def test_imports_run_one_way(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        named = imports(path)
        used = {name.partition(".")[0] for name in named} & ROOMS
        assert used <= MAY_IMPORT[room], path
        if room != "training":
            assert not any(name.startswith("torch.distributed") for name in named), path


@pytest.mark.parametrize("room", ["tokens", "training", "evaluation", "reporting", "experiments"])
def test_folders_and_modules_of_a_room_import_one_way(room: str) -> None:
    """A room is a top-level package. Its folders, and its modules outside folders, form a graph without cycles."""
    graph: dict[str, set[str]] = {}
    for path in sorted((ROOT / room).rglob("*.py")):
        node = path.relative_to(ROOT / room).parts[0].removesuffix(".py")
        targets = {name.split(".")[1] for name in imports(path) if name.startswith(f"{room}.")}
        graph.setdefault(node, set()).update(targets - {node})
    assert len(graph) > 2
    graphlib.TopologicalSorter(graph).prepare()


def test_no_two_modules_or_classes_share_a_name() -> None:
    modules: dict[str, list[str]] = {}
    classes: dict[str, list[str]] = {}
    for path in [
        path for room in (*MAY_IMPORT, "benchmarks", "examples") for path in sorted((ROOT / room).rglob("*.py"))
    ]:
        where = str(path.relative_to(ROOT))
        if path.name not in ("__init__.py", "command.py"):  # several folders have files with these names
            modules.setdefault(path.stem, []).append(where)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(where)
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
    assert {name: paths for name, paths in classes.items() if len(paths) > 1} == {}


def test_each_command_names_a_function_that_exists() -> None:
    """Commands name their modules as text, so that --help need not import them. Moving a module could break a name."""
    registries = [evaluation.command_line, experiments.command, reporting.command, tokens.command]
    commands = [command for registry in registries for command in registry.COMMANDS.values()]
    commands += training.command.FIND_COMMANDS.values()
    functions = [(command.module, command.function) for command in commands] + [*train.INSTEAD_OF_TRAINING.values()]
    assert len(functions) > 20
    for module, function in functions:
        tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
        assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], (module, function)


@pytest.mark.parametrize("script", ENTRY_SCRIPTS)
def test_help_is_quick_and_usage_errors_are_2(script: str) -> None:
    shown = execute(sys.executable, "-X", "importtime", script, "--help")
    assert shown.returncode == 0
    assert "examples:" in shown.stdout
    assert "Exit status: 0 done" in shown.stdout
    assert not re.search(r"\| +(torch|numpy|scipy|matplotlib|tiktoken|datasets)$", shown.stderr, re.MULTILINE)
    assert launch.run(ROOT / script, "--nonsense").returncode == 2


@pytest.mark.slow
def test_training_needs_no_optional_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('datasets', 'pyarrow', 'zstandard', 'huggingface_hub', 'tiktoken', 'transformers', 'pydantic',\n"
        "             'obstore'):\n"
        "    sys.modules[name] = None\n"
        "import training.job, evaluation.generation.smoke, evaluation.shared.load, tokens.documents.reader\n"
        "import tokens.prepare.token_writer, tokens.hub.download"
    )
    execute(sys.executable, "-c", code).check_returncode()


# Files that print something other than complete lines for people, such as help, generated text as it arrives, colored
# tokens, and commands
PRINTING = {
    *("common/output.py", "common/arguments.py", "experiments/command.py", "reporting/samples/batch_text.py"),
    "evaluation/generation/generated_text.py",
}


def test_one_function_prints_lines_for_people() -> None:
    files = [path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py")]
    for path in [*files, *(ROOT / script for script in ENTRY_SCRIPTS)]:
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        prints = [ast.unparse(call) for call in calls if ast.unparse(call) in ("print", "tqdm.write")]
        assert not prints or str(path.relative_to(ROOT)) in PRINTING, path


def test_links_of_pages_outside_the_site_exist() -> None:
    """mkdocs --strict checks the links in docs/; this test checks the pages in the root folder."""
    for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        links = re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text())
        for link in links:
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = ROOT / (name or page)
            assert target.exists(), f"{page}: {link}"
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if target.suffix == ".md" else []
            slugs = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert not anchor or anchor in slugs, f"{page}: {link}"


def test_pages_name_existing_files_and_modules() -> None:
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    rooms = "|".join([*MAY_IMPORT, "tests", "benchmarks", "examples"])
    for page in [page for page in pages if page.name != "NOTES.md"]:  # NOTES.md may name files that no longer exist
        text = page.read_text()
        files = set(re.findall(rf"(?<![\w./-])((?:{rooms})/[\w/]+\.(?:py|json|sh))\b", text))
        modules = re.findall(rf"python -m ((?:{rooms})(?:\.\w+)+)", text)  # other programs' modules are not checked
        files |= {f"{module.replace('.', '/')}.py" for module in modules}
        absent = {name for name in files if not (ROOT / name).exists()}
        assert absent == set(), page


def test_the_map_names_every_code_folder() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = {name for name in re.findall(r"^(\w[\w/]*/) ", page.split("## Map")[1], re.MULTILINE)}
    assert {name for name in named if not (ROOT / name).is_dir()} == set()
    tracked = execute("git", "ls-files").stdout.split()
    paths = [Path(path) for path in tracked if path.endswith(".py") and "/" in path]
    two_deep = ("tokens", "training")  # the map also lists the folders of these rooms
    folders = {f"{path.parent}/" if path.parts[0] in two_deep else f"{path.parts[0]}/" for path in paths} - {"tokens/"}
    assert folders and folders - named == set()
