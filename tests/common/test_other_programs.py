"""The table of other programs' options: each row names an existing command or key, and the docs show the table."""

import itertools
import re

import pytest

from common.other_programs import OPTIONS, Meaning, argument_advice, foreign_keys, option_advice
from tests.common.test_arguments import SCRIPTS, parsed_by, usage_error
from tests.launch import ROOT
from training.config.train_config import KEY_ROWS, KEYS

VALUES = {"RUN": "runs/quickstart", "MODEL": "runs/quickstart", "SOURCE": "stdlib", "DIR": "token_files/x", "C": "128"}
VALUES |= {"FILE": "tokenizer.json", "N": "300", "K": "5", "F": "0.1", "T": "0.5", "TEXT": "x", "NAME": "best"}
VALUES |= {"OWNER/NAME": "gpt2/x"}
DOCS = ROOT / "docs" / "other-programs.md"


def completed(command: str) -> list[str]:
    """Return the words of an advised command. Its placeholders are replaced with values."""
    return [VALUES.get(word, word.replace("=N", "=300").replace("=C", "=128")) for word in command.split()]


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.foreign_names.split()[0])
def test_each_advised_command_is_accepted(row: Meaning) -> None:
    words = [*itertools.dropwhile(lambda word: not word.endswith(".py"), completed(row.command))]
    assert row.command.startswith(("python ", "torchrun --standalone --nproc_per_node=N "))
    assert parsed_by(words[0], words[1:]) is not None


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.foreign_names.split()[0])
def test_foreign_options_suggest_a_command(row: Meaning, capsys: pytest.CaptureFixture[str]) -> None:
    script, _, command = (row.scripts[0] if row.scripts else "train.py").partition(" ")
    command = command or ("sample" if script == "evaluate.py" else "")
    for name in row.foreign_names.split():
        words = [*filter(None, [command]), "x", f"-{name}" if len(name) == 1 else f"--{name}", "3"]
        line = usage_error(script, words, capsys)
        assert f"unknown option; use {row.command}" in line, line


def test_foreign_keys_map_to_our_keys() -> None:
    for name, (ours, note) in foreign_keys(KEY_ROWS).items():
        section, _, key = ours.partition(".")
        assert key in KEYS[section] if ours else note, name


def test_foreign_names_have_one_meaning() -> None:
    names = [name for rows in KEY_ROWS.values() for key, row in rows.items() for name in {*row.foreign_names} - {key}]
    assert len(names) == len({*names})
    assert not {*names} & {key for rows in KEY_ROWS.values() for key in rows}


@pytest.mark.parametrize(
    ("script", "word", "value", "advice"),
    [
        ("train.py", "--compile", "False", "; did you mean --set train.compile=false?"),
        ("train.py", "--lr", "3e-4", "; did you mean --set train.learning_rate=3e-4?"),
        ("train.py", "--trainer.seed", "", "; did you mean --set train.random_seed=VALUE?"),
        ("train.py", "--model.num_layers", "8", "; did you mean --set model.n_layers=8?"),
        ("evaluate.py", "--lr", "1", "; use python train.py RUN --set train.learning_rate=1"),
        (
            "evaluate.py",
            "--batch_size",
            "8",
            "; use python train.py RUN --set train.microbatch_size=VALUE (the sequ",
        ),
        ("train.py", "--zzz", "", ""),
    ],
)
def test_keys_as_options_suggest_the_set_option(script: str, word: str, value: str, advice: str) -> None:
    answer = option_advice(script, word, value, KEY_ROWS, sets_keys=script == "train.py")
    assert answer.startswith(advice) if advice else answer == ""


def test_foreign_arguments_suggest_an_option() -> None:
    assert argument_advice("train.py", "", "datasets") == "; use python train.py RUN --token-files datasets"
    assert argument_advice("train.py", "", "model.n_layers=4") == "; did you mean --set model.n_layers=4?"
    assert argument_advice("report.py", "", "datasets") == ""


def test_docs_show_the_whole_table() -> None:
    shown = DOCS.read_text()
    for row in OPTIONS:
        names = ", ".join(f"`{name}`" for name in row.foreign_names.split())
        where = ", ".join(f"`{place}`" for place in row.scripts)
        assert f"| {names} | `{row.command}` | {row.note} | {where} |" in shown
    keys: dict[tuple[str, str], list[str]] = {}
    for name, (ours, note) in foreign_keys(KEY_ROWS).items():
        keys.setdefault((ours, note), []).append(f"`{name}`")
    for (ours, note), names_of_key in keys.items():
        row = f"| {', '.join(names_of_key)} | {f'`{ours}`' if ours else ''} | {note} |"
        assert row in shown, f"docs/other-programs.md: paste this below 'Keys':\n{row}"
    assert len(re.findall(r"^\| `", shown, re.MULTILINE)) == len(OPTIONS) + len(keys)
    assert SCRIPTS  # the import is needed for the parametrized tests
