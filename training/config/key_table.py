"""Table of all keys of model.json and train.json: type and default by the code, meaning by the tables of docs/."""

import json
import re
from pathlib import Path

import attrs

from common.arguments import described
from training.config.train_config import KEYS

PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("architecture.md", "run-directory.md")]


def key_table() -> str:
    """Return the keys of both files, as train.py --keys prints them."""
    rows = [row for page in PAGES for row in re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*?) \|", page.read_text(), re.M)]
    meanings = {key: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", meaning).replace("`", "") for key, meaning in rows}
    lines = []
    for section, keys in KEYS.items():
        lines.append(f"{section}.json:")
        for key, field in keys.items():
            required, wanted = field.default is attrs.NOTHING, getattr(field.validator, "wanted", "a string, or a list")
            text = f"{meanings[key]}; {wanted}{' (required)' if required else ''}"
            lines.append(described(key, text, None if required else json.dumps(field.default)))
    return "\n".join(lines)
