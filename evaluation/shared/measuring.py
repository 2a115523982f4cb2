"""Measurement of models by all ranks: each model loaded, measured and its result stored; batches of work shared out."""

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

TIMEOUT_SECONDS = 3600  # of collectives: how long ranks wait for each other
Batch = TypeVar("Batch")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")


def measure_each(
    options: MeasureOptions,
    kind: str,
    prepare: Callable[[list[ModelLocation]], Prepared],
    measure: Callable[[Trained, Prepared, Ranks], tuple[dict[str, Any], str]],
) -> None:
    """Measure, store and print. `prepare`: on rank 0, before loading; `measure`: on all, returns result and text.

    A model that cannot be measured does not stop the others; BadInput at the end names it.
    """
    ranks = meet(options.device, TIMEOUT_SECONDS)

    def make() -> tuple[list[ModelLocation], Prepared, list[Problem]]:
        places, problems = accepted(options.models, partial(locate, name=options.checkpoint))
        if not places:
            raise BadInput(*problems)
        return places, prepare(places), problems

    def measured(place: ModelLocation) -> tuple[WeightsIdentity | None, tuple[dict[str, Any], str]]:
        trained = load_on_all(ranks, place, options.tokenizer)
        # Before the measurement, which may lay the network out for generation.
        weights = identity_of(trained.network, place.path) if ranks.coordinates else None
        values, text = measure(trained, prepared, ranks)
        if trained.given_tokenizer is not None:
            values = {GIVEN_TOKENIZER: trained.given_tokenizer.as_record(), **values}
        return weights, (values, text)

    places, prepared, problems = from_coordinator(ranks, make)
    for place in places:
        results, refused = accepted([place], measured)
        problems += refused
        for weights, (values, text) in results:
            if ranks.coordinates:
                append_result(place.home, place.title, kind, values, weights)
            show(*f"{place.path}:{text}".split("\n"), once=True)
    stop()
    if problems:
        raise BadInput(*problems)


def share(ranks: Ranks, batches: Sequence[Batch], work: Callable[[Batch], Result], unit: str = "batch") -> list[Result]:
    """Return `work` of each batch, in order, on every rank. Batches depend on no rank. Raises BadInput on all."""
    if ranks.device.type == "cpu":
        torch.set_num_threads(1)  # the number of threads changes sums
    part = ranks.data_parallel
    mine = batches[part.rank :: part.size]
    bar = tqdm(mine, disable=None if ranks.coordinates else True, unit=unit, leave=False)
    shares = dict(together(ranks, lambda: (part.rank, [work(batch) for batch in bar])))
    return [shares[number % part.size][number // part.size] for number in range(len(batches))]
