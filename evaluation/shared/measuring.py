"""Measure models on all ranks: load each model, share the batches of work among the ranks, and store the result."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from common.errors import BadInput, Problem, accepted
from common.output import show
from evaluation.command_line import MeasureOptions
from evaluation.shared.load import Trained, load_on_all
from evaluation.shared.model_location import ModelLocation, locate
from evaluation.shared.results import append_result
from evaluation.shared.weights import WeightsIdentity
from evaluation.shared.weights_on_disk import identity_of
from training.parallel.process_group import Ranks, from_coordinator, meet, stop, together
from training.telemetry.metrics_log import GIVEN_TOKENIZER

TIMEOUT_SECONDS = 3600  # longest time that a rank waits for the other ranks in a collective
Batch = TypeVar("Batch")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")


def measure_each(
    options: MeasureOptions,
    kind: str,
    prepare: Callable[[list[ModelLocation]], Prepared],
    measure: Callable[[Trained, Prepared, Ranks], tuple[dict[str, Any], str]],
) -> None:
    """Measure each model of a command, store its result under the name `kind`, and print it.

    `prepare`: runs on rank 0 before any model is loaded; all ranks receive its return value. `measure`: runs on all
    ranks, and returns the fields of the result and the text to print.

    If a model cannot be measured, the other models are still measured, and BadInput is raised at the end.
    """
    ranks = meet(options.device, TIMEOUT_SECONDS)

    def prepare_all() -> tuple[list[ModelLocation], Prepared, list[Problem]]:
        locations, problems = accepted(options.models, partial(locate, name=options.checkpoint))
        if not locations:
            raise BadInput(*problems)
        return locations, prepare(locations), problems

    def load_and_measure(location: ModelLocation) -> tuple[WeightsIdentity | None, tuple[dict[str, Any], str]]:
        trained = load_on_all(ranks, location, options.tokenizer)
        # The weights are hashed before the measurement, which may change the network's layout for generation.
        weights = identity_of(trained.network, location.path) if ranks.coordinates else None
        values, text = measure(trained, prepared, ranks)
        if trained.given_tokenizer is not None:
            values = {GIVEN_TOKENIZER: trained.given_tokenizer.as_record(), **values}
        return weights, (values, text)

    locations, prepared, problems = from_coordinator(ranks, prepare_all)
    for location in locations:
        results, new_problems = accepted([location], load_and_measure)
        problems += new_problems
        for weights, (values, text) in results:
            if ranks.coordinates:
                append_result(location.home, location.title, kind, values, weights)
            show(*f"{location.path}:{text}".split("\n"), once=True)
    stop()
    if problems:
        raise BadInput(*problems)


def share(ranks: Ranks, batches: Sequence[Batch], work: Callable[[Batch], Result], unit: str = "batch") -> list[Result]:
    """Divide the batches among the ranks. Return, on every rank, the results of `work` in the order of the batches.

    The batches must be the same on all ranks. If `work` raises BadInput on one rank, all ranks raise it.
    """
    if ranks.device.type == "cpu":
        torch.set_num_threads(1)  # because the rounding of sums depends on the number of threads
    part = ranks.data_parallel
    rank_batches = batches[part.rank :: part.size]
    bar = tqdm(rank_batches, disable=None if ranks.coordinates else True, unit=unit, leave=False)
    shares = dict(together(ranks, lambda: (part.rank, [work(batch) for batch in bar])))
    return [shares[number % part.size][number // part.size] for number in range(len(batches))]
