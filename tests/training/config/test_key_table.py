"""The table of keys: to add a key, a row in the code is enough, and the tables in docs/ agree with these rows."""

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from common.checks import KeyRow, OlderSpelling, boolean, integer, key_field, key_of, row_of
from common.errors import BadInput
from common.other_programs import foreign_keys
from model.config import ModelConfig, option
from tests.conftest import ROOT, write_run
from tests.launch import execute
from training.config import train_config
from training.config.dataset_config import DatasetPart
from training.config.foreign_keys import translate
from training.config.key_table import explanation, key_table
from training.config.train_config import KEY_ROWS, KEYS, load_run

DATASET_KEYS = {key_of(field): field for field in attrs.fields(DatasetPart)}
# The page and the heading of each table, and the keys that the table may contain
TABLES: list[tuple[str, str, Mapping[str, Any]]] = [
    ("architecture.md", "# Architecture options", KEYS["model"]),
    ("run-directory.md", "## model.json", KEYS["model"]),
    ("run-directory.md", "## train.json", KEYS["train"]),
    ("run-directory.md", "### Dataset mixtures", DATASET_KEYS),
]


def documented_rows(page: str, heading: str) -> dict[str, str]:
    """Return the default and the meaning of each key in the table below a heading, without links and backticks."""
    section = (ROOT / "docs" / page).read_text().partition(f"{heading}\n")[2]
    lines = re.findall(r"^\| `(\w+)` (\|[^|\n]*\|[^|\n]*\|)", re.split(r"\n#+ ", section)[0], re.MULTILINE)
    return {key: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cells).replace("`", "") for key, cells in lines}


def row_to_document(field: "attrs.Attribute[Any]") -> str:
    default = "required" if field.default is attrs.NOTHING else json.dumps(field.default)
    return f"| {default} | {explanation(field)} |"


@pytest.mark.parametrize(("page", "heading", "keys"), TABLES, ids=lambda value: str(value)[:30])
def test_docs_tables_match_the_key_rows(page: str, heading: str, keys: Mapping[str, Any]) -> None:
    rows = documented_rows(page, heading)
    assert rows, f"docs/{page}: no table of keys below {heading!r}"
    unknown = sorted(rows.keys() - keys.keys())
    assert not unknown, f"docs/{page}, {heading!r}: {unknown} are not keys; delete their rows"
    for key, cells in rows.items():
        row = row_to_document(keys[key])
        assert cells == row, f"docs/{page}, {heading!r}: paste this, then add links and backticks:\n| `{key}` {row}"


def test_each_key_has_one_row_in_docs() -> None:
    documented = [key for page, heading, _ in TABLES[:3] for key in documented_rows(page, heading)]
    for key, field in (KEYS["model"] | KEYS["train"]).items():
        page = "run-directory.md (train.json) or architecture.md"
        assert documented.count(key) == 1, f"docs/{page}: paste this once:\n| `{key}` {row_to_document(field)}"
    assert documented_rows(*TABLES[3][:2]).keys() == DATASET_KEYS.keys()


def test_each_key_has_a_meaning() -> None:
    for field in (KEYS["model"] | KEYS["train"]).values():
        row = field.metadata[KeyRow]
        assert row.meaning.strip() == row.meaning and not re.search(r"[`|]|\]\(", row.meaning), field.name


def test_keys_option_prints_every_key_in_80_columns() -> None:
    printed = execute(sys.executable, "train.py", "--keys").stdout
    assert printed == f"{key_table()}\n"
    assert max(map(len, printed.splitlines())) <= 80
    text = " ".join(printed.split())
    for key, field in (KEYS["model"] | KEYS["train"] | DATASET_KEYS).items():
        assert f"{key} {explanation(field)}; accepts {row_of(field).accepted_values}" in text
    clipping = "gradient clipping: largest global L2 norm of the gradient; null: no clipping; recommended: 1.0;"
    assert f"clipping_max_norm {clipping}" in text
    assert "older name: minibatch_size; accepts an integer of at least 1, at most 1,048,576 (required)" in text


@attrs.frozen(kw_only=True)
class MadeUpModel(ModelConfig):
    parallel_block: bool = option(
        boolean(),
        False,
        meaning="attention and MLP read the same input",
        names="parallel_residual",
        keys={"gptj": ("use_parallel_residual",)},
    )


@attrs.frozen(kw_only=True)
class MadeUpOptions:
    made_up_steps: int = key_field(
        integer(1),
        7,
        meaning="steps of an invention",
        recommended=9,
        names="invented_steps",
        older=OlderSpelling("made_up_batches", lambda value, file_values: value * file_values["microbatch_size"]),
        similar={"in epochs": "invented_epochs"},
    )


@pytest.fixture
def new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add one key for model.json and one for train.json. Each needs only a new row in the key table."""
    for section, options in (("model", MadeUpModel), ("train", MadeUpOptions)):
        for key, field in attrs.fields_dict(options).items():
            monkeypatch.setitem(KEYS[section], key, field)
            monkeypatch.setitem(KEY_ROWS[section], key, row_of(field))


@pytest.mark.usefixtures("new_keys")
def test_a_new_row_appears_in_the_table_of_keys() -> None:
    text = " ".join(key_table().split())
    assert "parallel_block attention and MLP read the same input; accepts true or false (default: false)" in text
    ending = "older name: made_up_batches; accepts an integer of at least 1, at most 2^53 (default: 7)"
    assert f"made_up_steps steps of an invention; recommended: 9; {ending}" in text


@pytest.mark.usefixtures("new_keys")
def test_a_new_row_explains_other_programs_names(tmp_path: Any) -> None:
    table = foreign_keys(KEY_ROWS)
    assert table["invented_steps"] == ("train.made_up_steps", "")
    assert table["invented_epochs"] == ("train.made_up_steps", "in epochs")
    assert table["use_parallel_residual"] == table["parallel_residual"] == ("model.parallel_block", "")
    run = write_run(tmp_path / "r", ROOT, invented_epochs=1)
    message = r"unknown key 'invented_epochs'; the corresponding key is train.made_up_steps, in epochs"
    with pytest.raises(BadInput, match=message):
        load_run(run, [])
    train = {"made_up_batches": 2, "microbatch_size": 4}
    [notice] = translate({}, train, KEY_ROWS["train"], {"train": run / "train.json", "model": run / "model.json"})
    assert train == {"made_up_steps": 8, "microbatch_size": 4}
    assert notice == f"{run}/train.json: made_up_batches 2 is read as made_up_steps 8"


def test_the_table_allows_fields_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    @attrs.frozen
    class Plain:
        plain: int = 3

    monkeypatch.setitem(KEYS["train"], "plain", attrs.fields(Plain).plain)
    assert re.search(r"^  plain +no row states what this key means", key_table(), re.MULTILINE)


def test_docs_mention_older_names_and_recommended_keys() -> None:
    page = " ".join((ROOT / "docs" / "run-directory.md").read_text().split())
    rows = KEY_ROWS["train"].values()
    assert all(f"`{row.older.name}`" in page for row in rows if row.older is not None)
    assert train_config.GOOD_RECIPE == {"shuffle": True, "schedule_learning_rate": True, "clipping_max_norm": 1.0}
    note = page.partition("A NOTE names ")[2].partition(" if you leave them out")[0]
    assert {*re.findall(r"`(\w+)`", note)} == {*train_config.GOOD_RECIPE}
