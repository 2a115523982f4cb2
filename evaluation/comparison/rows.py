"""The models that are compared: what is kept of each in `evaluations.jsonl` and in its run. No model is loaded."""

import json
from pathlib import Path
from typing import Any

import attrs

from errors import BadInput
from evaluation.comparison.measures import understood
from evaluation.cost import Cost, cost_of
from evaluation.load import Place, home_of
from evaluation.results import read_results
from training import checkpoint
from training.metrics import EVALUATIONS
from training.record import listed

# What of a run's configuration may differ between runs that differ in nothing but their seed: where tokens lie, of
# which the sha256 is compared instead, and how many sequences fit into a GPU.
NOT_SCIENCE = ("random_seed", "dataset", "microbatch_size", "gradient_accumulation_steps")


@attrs.frozen(kw_only=True)
class Row:
    """One model and what was measured of it."""

    label: str  # what it is called beside the others
    title: str  # what its results call it
    home: Path
    results: list[dict[str, Any]]  # that can be understood, oldest first
    cost: Cost | None  # None, as the others, where no checkpoint of ours tells
    validation_loss: float | None
    seed: int | None
    recipe: str | None  # equal for runs that differ in nothing but their seed


def read_rows(references: list[str]) -> list[Row]:
    """Return the models that a command line names; of a run the checkpoint that was measured last.

    Raises BadInput where there are no results.
    """
    rows: list[Row] = []
    for reference in references:
        row = _read(reference)
        if not any((row.home, row.title) == (other.home, other.title) for other in rows):
            rows.append(row)
    titles = [row.title for row in rows]
    return [attrs.evolve(row, label=f"{row.home}: {row.title}") if titles.count(row.title) > 1 else row for row in rows]


def _read(reference: str) -> Row:
    home, path = home_of(reference), Path(reference)
    results = [result for result in read_results(home) if understood(result)]
    if path.is_dir() and path.resolve() != home.resolve():  # a checkpoint
        results = [result for result in results if _checkpoint(result["model"]) == path.resolve().name]
    if not results:
        raise BadInput(
            f"{home / EVALUATIONS}: got no results of {reference} that can be compared; measure it first: "
            f"python evaluate.py loss {reference}"
        )
    title = results[-1]["model"]
    state = _state(home, title)
    config = state.get("config", {})
    return Row(
        label=title,
        title=title,
        home=home,
        results=[result for result in results if result["model"] == title],
        cost=cost_of(state, Place(home, home, home).record) if state else None,
        validation_loss=state.get("validation_loss"),
        seed=config["train"]["random_seed"] if state else None,
        recipe=_recipe(state) if state else None,
    )


def _checkpoint(title: str) -> str:
    """Return the checkpoint in a title, which begins with the run's name."""
    return title.rpartition(" ")[2]


def _state(home: Path, title: str) -> dict[str, Any]:
    """Return `state.json` of a checkpoint, or {} where there is none any more."""
    path = home / "checkpoints" / _checkpoint(title)
    return checkpoint.read_state(path) if (path / checkpoint.STATE).is_file() else {}


def _recipe(state: dict[str, Any]) -> str:
    config = state["config"]
    train = {key: value for key, value in config["train"].items() if key not in NOT_SCIENCE}
    splits = [listed(config.get(key) or []) for key in ("train_stream", "validation_stream")]
    tokens = [[stream["sha256"] for stream in split] for split in splits]
    return json.dumps(
        [config["model"], train, config["global_batch_size"], config.get("shares"), state["step"], tokens],
        sort_keys=True,
    )
