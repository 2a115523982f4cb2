"""Items of random words in the form of hellaswag_val.jsonl."""

import json
import random
from pathlib import Path
from typing import Any

ITEM = {
    "ind": 4,
    "activity_label": "Roof removal",
    "ctx_a": "A man is on a roof.",
    "ctx_b": "he",
    "ctx": "A man is on a roof. he",
    "endings": ["rips up tiles.", "sings.", "holds a red cube.", "is a roof."],
    "label": 3,
    "source_id": "activitynet~v_1",
    "split": "val",
}


def write_items(path: Path, count: int = 37) -> list[dict[str, Any]]:
    """Write items of random words in the form of hellaswag_val.jsonl, a few of them longer than CONTEXT bytes."""
    draw = random.Random(0)
    words = ["def", "class", "return", "the", "a", "import", "self", "tar", "header", "open", "[step]", "[title]", "in"]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(2, most)))

    rows = []
    for number in range(count):
        first, then = text(12), "" if number % 3 else text(3)
        context = f"{first} {then}".strip()
        texts = {"activity_label": text(2), "ctx_a": first, "ctx_b": then, "ctx": context}
        rows.append(ITEM | texts | {"ind": number, "endings": [text(6) for _ in range(4)], "label": draw.randrange(4)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows
