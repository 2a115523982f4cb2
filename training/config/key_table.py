"""Table of all keys of model.json and train.json: type and default by the code, meaning by the tables of docs/."""

import json
import re
from pathlib import Path

import attrs

from common.arguments import described
from training.config.train_config import KEYS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("run-directory.md", "architecture.md")


def key_table() -> str:
    """Return the keys of both files, as train.py --keys prints them."""
    meanings, lines = documented_keys(), []
    for section, keys in KEYS.items():
        lines.append(f"{section}.json:")
        for key, field in keys.items():
            default, wanted = None, getattr(field.validator, "wanted", "a string, or a list of objects")
            if field.default is not attrs.NOTHING:
                default = json.dumps(field.default)
            text = f"{meanings.get(key, '')}; {wanted}{' (required)' if default is None else ''}"
            lines.append(described(key, text, default))
        lines.append("")
    return "\n".join(
        [*lines, "--set KEY=VALUE overrides one; docs/run-directory.md and docs/architecture.md say more."]
    )


def documented_keys() -> dict[str, str]:
    """Return the meaning of each key, the third column of the tables, as plain text."""
    rows: dict[str, str] = {}
    for page in PAGES:
        for key, meaning in re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*?) \|", (DOCS / page).read_text(), re.MULTILINE):
            rows.setdefault(key, re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", meaning).replace("`", ""))
    return rows
