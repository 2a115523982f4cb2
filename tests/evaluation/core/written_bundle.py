"""Write a bundle in the format of nanochat. It has tasks of all kinds, which consist of random words."""

import json
import random
import zipfile
from pathlib import Path
from typing import Any

WORDS = ["def", "class", "the", "naïve", "Straße", "日本語", "😀", "in", "12", "don't"]
KINDS = {"choice": "multiple_choice", "schema": "schema", "language": "language_modeling"}
BASELINES = {"choice": 25, "schema": 50, "language": 0}
TASKS = [  # label, file, number of examples, delimiter
    ("choice_0", "choice", 0, " "),
    ("choice_2", "choice", 2, "\nAnswer: "),
    ("schema_0", "schema", 0, " "),
    ("schema_1", "schema", 1, " "),
    ("language_0", "language", 0, ""),
    ("language_3", "language", 3, "\n"),
]


def items(count: int) -> dict[str, list[dict[str, Any]]]:
    """Return items of each kind. Some have equal choices, a choice that is a prefix of another, or a long text."""
    draw = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(count):
        choices = [text(1, 5) for _ in range(4)]
        choices[1] = f"{choices[0]} {text(1, 2)}" if number % 3 == 0 else choices[1]
        choices[3] = choices[2] if number % 5 == 0 else choices[3]
        query = text(2, 40 if number % 7 == 0 else 9)
        by_kind["choice"].append({"query": query, "choices": choices, "gold": draw.randrange(4), "source": 1})
        options = [text(2, 9), text(2, 9)]
        by_kind["schema"].append({"context_options": options, "continuation": text(1, 5), "gold": draw.randrange(2)})
        by_kind["language"].append({"context": f" {text(3, 12)}\n", "continuation": text(1, 2) + " " * (number % 2)})
    return by_kind


def write_bundle(folder: Path, count: int = 23, **changed: list[dict[str, Any]]) -> Path:
    """Write a folder and, next to it, an `eval_bundle.zip` with the same content. Return the folder.

    `changed`: for a kind of task, the items to write instead of the usual ones.
    """
    rows = items(count) | changed
    entries = [
        f"- label: {label}\n  dataset_uri: some/{kind}.jsonl\n  num_fewshot: [{shots}]\n"
        f"  icl_task_type: {KINDS[kind]}\n" + (f"  continuation_delimiter: {json.dumps(end)}\n" if end != " " else "")
        for label, kind, shots, end in TASKS
    ]
    table = "".join(f'{label},world,{BASELINES[kind]},"a, b"\n' for label, kind, _, _ in TASKS)
    files = {
        "core.yaml": "seed: 1\nicl_tasks:\n" + "".join(entries),
        "eval_meta_data.csv": f"Eval Task,Task Category,Random baseline,Description\n{table}",
        **{f"eval_data/some/{kind}.jsonl": "".join(json.dumps(row) + "\n" for row in rows[kind]) for kind in rows},
    }
    with zipfile.ZipFile(folder.with_name("eval_bundle.zip"), "w") as archive:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
            archive.writestr(f"eval_bundle/{name}", content)
    return folder
