"""False and true positives of `evaluate.py compare`, on models of one recipe and of a better one.

python benchmarks/null_pairs.py FOLDER [--runs 24]

Trains tiny models with different seeds, some with different values of keys that change no result, and six with a third
of the learning rate; measures the held-out loss of all on the same text; compares them as evaluate.py does. Then the
runs of the one recipe are labelled as several recipes at random, many times. FOLDER is kept: the same command resumes.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from evaluation.comparison.compare import compare  # noqa: E402  # after the path to it
from evaluation.comparison.rows import Row, read_rows  # noqa: E402

MODEL = {"vocab_size": 257, "context_length": 64, "emb_dim": 32, "n_heads": 2, "n_layers": 2}
TRAIN: dict[str, Any] = {
    "min_train_tokens": 250_000,
    "shuffle": True,
    "microbatch_size": 16,
    "global_batch_size": 16,
    "learning_rate": 0.004,
    "validation_interval": None,
}
WITHOUT_EFFECT: list[dict[str, Any]] = [
    {},
    {"log_interval": 7},
    {"keep_checkpoints": 1, "checkpoint_interval": 100},
    {"parallel": "fsdp"},
    {"microbatch_size": 8, "timeout_seconds": 60},
]
SHUFFLES = 1000  # random labellings


def main() -> None:
    """Train missing runs, and print the comparisons."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=24, help="of the one recipe (%(default)s)")
    arguments = parser.parse_args()
    folder, count = arguments.folder.resolve(), arguments.runs
    equal = [_train(folder, seed, WITHOUT_EFFECT[seed % len(WITHOUT_EFFECT)]) for seed in range(count)]
    lower = [_train(folder, seed, {"learning_rate": TRAIN["learning_rate"] / 3}) for seed in range(count, count + 6)]
    if not all((run / "evaluations.jsonl").is_file() for run in (*equal, *lower)):
        _call("evaluate.py", "loss", *equal, *lower, "--device", "cpu", "--from", 0)
    rows = read_rows([str(run) for run in (*equal, *lower)])
    equal_rows, lower_rows = rows[:count], rows[count:]
    print(f"{len({row.recipe for row in equal_rows})} recipe with {count} seeds, as compare says:")
    for found in (compare(equal_rows), compare([*equal_rows[:3], *lower_rows[:3]])):
        print(*found.statements, *(note for note in found.notes if note.startswith("Seed noise")), "", sep="\n")
    draw = np.random.default_rng(0)
    table = [
        [
            " + ".join(map(str, seeds)),
            SHUFFLES,
            f"{_winners([(equal_rows, count) for count in seeds], draw) / SHUFFLES:.1%}",
        ]
        for seeds in ([3, 3], [2, 2], [3, 3, 3], [2, 2, 2, 2], [2, 1, 1], [1, 1])
    ]
    better = _winners([(equal_rows, 3), (lower_rows, 3)], draw) / SHUFFLES
    table.append(["3 + 3 of the lower learning rate", SHUFFLES, f"{better:.1%}"])
    print(tabulate(table, ["seeds of the recipes", "comparisons", "with a winner"]))


def _winners(recipes: list[tuple[list[Row], int]], draw: np.random.Generator) -> int:
    """Return the number of comparisons with a winner. `recipes`: the runs of each, and the number to draw."""
    named = 0
    for _ in range(SHUFFLES):
        left = {id(rows): list(draw.permutation(len(rows))) for rows, _ in recipes}
        called = [
            attrs.evolve(rows[left[id(rows)].pop()], recipe=str(number))
            for number, (rows, count) in enumerate(recipes)
            for _ in range(count)
        ]
        named += any(" better than " in line for line in compare(called).statements)
    return named


def _train(folder: Path, seed: int, keys: dict[str, Any]) -> Path:
    tokens = folder / "tokens"
    if not (tokens / "manifest.json").is_file():
        options = ("--tokenizer", "bytes", "--validation-fraction", 0.03, "--split", "tail")
        _call("prepare_data.py", "stdlib", "--output", tokens, *options)
    run = folder / f"run-{seed:02d}"
    run.mkdir(exist_ok=True)
    (run / "model.json").write_text(json.dumps(MODEL))
    (run / "train.json").write_text(json.dumps({"dataset": str(tokens)} | TRAIN | {"random_seed": seed} | keys))
    if not (run / "checkpoints" / "latest").exists():
        _call("train.py", run, "--device", "cpu")
    return run


def _call(*command: object) -> None:
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
