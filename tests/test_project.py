"""The project's own files: versions, requirements, the Dockerfile, and GitHub's workflows and forms."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.conftest import ROOT
from tests.launch import execute

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires tomli on Python 3.10

DOCKERFILE = (ROOT / "Dockerfile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir())


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_version_and_date_agree_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    releases = re.findall(
        r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert releases[0] == (project()["version"], citation["date-released"])
    assert citation["version"] == project()["version"]


def test_pinned_versions_are_within_the_declared_ranges() -> None:
    ranges = {requirement.name: requirement for requirement in map(Requirement, project()["dependencies"])}
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line]
    assert {pin.name for pin in pins} == set(ranges)
    for pin in pins:
        [version] = pin.specifier
        assert version.operator == "==" and version.version in ranges[pin.name].specifier, pin


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the image contains when its packages are installed."""
    [files] = re.findall(r"^COPY (.+) \./$", DOCKERFILE, re.MULTILINE)
    for name in files.split():
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_the_dockerfile_runs_the_makefiles_commands_in_order(image_folder: Path) -> None:
    # Together, the image's commands do the same in this folder as `make install` alone.
    expected = recipe_lines(image_folder, "install")
    performed: list[str] = []
    for command in installation_commands():
        lines = recipe_lines(image_folder, *command.split()[1:])
        performed += [line for line in lines if line not in performed]
    assert performed == expected
    assert any("-m venv .venv" in line for line in expected) and any("requirements.txt" in line for line in expected)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_dockerfiles_commands_run_in_an_empty_folder(image_folder: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "MAKEFLAGS")}
    script = "set -eu\n" + "\n".join(installation_commands())
    done = execute("bash", "-c", script, cwd=image_folder, seconds=1400, **clean | {"PYTHON": base_python()})
    assert done.returncode == 0, done.stdout + done.stderr
    # The rest of the repository is copied afterwards, and the image's command runs in the new environment.
    python = image_folder / ".venv" / "bin" / "python"
    last = yaml.safe_load(re.findall(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE)[0])
    done = execute(python, *last[1:], cwd=ROOT)
    assert last[0] == "python" and done.returncode == 0 and "Usage: train.py" in done.stdout


def test_every_workflow_step_is_a_command_of_ours() -> None:
    documented = (ROOT / ".ci" / "run").read_text() + (ROOT / "README.md").read_text()
    targets = re.findall(r"^([\w.-]+(?: [\w.-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known_targets = {target for line in targets for target in line.split()}
    commands = []
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        assert all(("run" in step) != ("uses" in step) for step in steps)
        commands += [step["run"] for step in steps if "run" in step]
    assert {"make lint", "make test", "make train", "make docs"} <= set(commands)
    for command in commands:
        program, *arguments = command.split()
        assert (program == "make" and set(arguments) <= known_targets) or command in documented, command


def test_continuous_integration_runs_each_supported_python() -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["linux"]
    assert job["strategy"]["matrix"]["python-version"] == ["3.10", "3.12", "3.13"]
    assert project()["requires-python"] == ">=3.10"


def test_the_forms_for_issues_can_be_read() -> None:
    forms = [yaml.safe_load(path.read_text()) for path in FORMS if path.name != "config.yml"]
    assert len(forms) == 2
    for form in forms:
        assert form["name"] and form["description"]
        fields = [field["id"] for field in form["body"]]
        assert len(set(fields)) == len(fields) > 0


def installation_commands() -> list[str]:
    """Return the Dockerfile's RUN commands, except the command that installs packages of the operating system."""
    commands = re.findall(r"^RUN (.+)$", DOCKERFILE, re.MULTILINE)
    assert commands[0].startswith("apt-get update ") and all(command.startswith("make ") for command in commands[1:])
    return commands[1:]


def recipe_lines(folder: Path, *targets: str) -> list[str]:
    """Return the shell commands that make would run for the targets."""
    done = execute("make", "--dry-run", *targets, cwd=folder, PYTHON="python3")
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("\\\n", " ").splitlines()


def base_python() -> str:
    """Return the interpreter from which this environment was created. An image has no environment yet."""
    return str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
