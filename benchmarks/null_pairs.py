"""False and true positives of `evaluate.py compare`, on models of one recipe and of a better one.

python benchmarks/null_pairs.py FOLDER [--runs 24]

Trains tiny models with different seeds, some with different values of keys that change no result, and six with a third
of the learning rate; measures the held-out loss of all on the same text; compares them as evaluate.py does. Then the
runs of the one recipe are labelled as several recipes at random, many times. FOLDER is kept: the same command resumes.
"""

from pathlib import Path
from typing import Any

import attrs
import command
import numpy as np
from random_run import write_run

from common.errors import BadInput
from evaluation.comparison.compare import compare
from evaluation.comparison.rows import Row, read_rows

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


RECIPES = ((3, 3), (2, 2), (3, 3, 3), (2, 2, 2, 2), (2, 1, 1), (1, 1))  # runs of each, drawn from the one


def main(folder: Path, /, *, runs: int = 24) -> None:
    """Train missing runs of the one recipe, and six of the better one; print the comparisons."""
    if runs < (most := max(map(sum, RECIPES))):
        raise BadInput(f"--runs: got {runs}, wanted {most} or more, as many as are drawn at once")
    folder = folder.resolve()
    equal = [_train(folder, seed, WITHOUT_EFFECT[seed % len(WITHOUT_EFFECT)]) for seed in range(runs)]
    lower = [_train(folder, seed, {"learning_rate": TRAIN["learning_rate"] / 3}) for seed in range(runs, runs + 6)]
    if not all((run / "evaluations.jsonl").is_file() for run in (*equal, *lower)):
        command.call("evaluate.py", "loss", *equal, *lower, "--device", "cpu", "--from", 0)
    rows = read_rows([str(run) for run in (*equal, *lower)])
    equal_rows, lower_rows = rows[:runs], rows[runs:]
    print(f"{len({row.recipe for row in equal_rows})} recipe with {runs} seeds, as compare says:")
    for found in (compare(equal_rows), compare([*equal_rows[:3], *lower_rows[:3]])):
        print(*found.statements, *(note for note in found.notes if note.startswith("Seed noise")), "", sep="\n")
    draw = np.random.default_rng(0)
    drawn = {" + ".join(map(str, seeds)): [(equal_rows, count) for count in seeds] for seeds in RECIPES}
    drawn["3 + 3 of the lower learning rate"] = [(equal_rows, 3), (lower_rows, 3)]
    table = [[name, str(SHUFFLES), f"{_winners(recipes, draw) / SHUFFLES:.1%}"] for name, recipes in drawn.items()]
    print(command.table(["seeds of the recipes", "comparisons", "with a winner"], table))


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
        command.call("prepare_data.py", "stdlib", "--output", tokens, *command.BYTES)
    run = folder / f"run-{seed:02d}"
    write_run(run, MODEL, {"dataset": str(tokens)} | TRAIN | {"random_seed": seed} | keys)
    if not (run / "checkpoints" / "latest").exists():
        command.call("train.py", run, "--device", "cpu")
    return run


if __name__ == "__main__":
    command.run(main)
