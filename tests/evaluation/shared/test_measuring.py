"""Commands that measure several models: if a model cannot be measured, the other models still are."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import BadInput
from evaluation.command_line import LossCommand
from evaluation.shared import measuring
from training.parallel import process_group


def test_bad_models_do_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stored, prepared = [], []

    def locate(reference: str, name: str | None) -> Any:
        if reference == "gone":
            raise BadInput("gone: no such directory")
        return SimpleNamespace(path=Path(reference), home=Path(reference), title=reference)

    def load(_: Any, location: Any, tokenizer: str | None) -> Any:
        if location.title == "damaged":
            raise BadInput("damaged: its sha256 differs")
        return SimpleNamespace(title=location.title, network=None, given_tokenizer=None)

    def measure(location: Any, _: Any, ranks: Any) -> tuple[dict[str, Any], str]:
        if location.title == "endless":
            raise BadInput("endless: its loss is not finite")
        return {"value": 1}, f" measured {location.title}"

    monkeypatch.setattr(measuring, "locate", locate)
    monkeypatch.setattr(measuring, "load_on_all", load)
    monkeypatch.setattr(measuring, "identity_of", lambda network, directory: None)
    monkeypatch.setattr(measuring, "append_result", lambda *values: stored.append(values))

    def run(*models: str) -> list[str]:
        command = LossCommand(models, device="cpu")
        with pytest.raises(BadInput) as raised:
            measuring.measure_each(command, "loss", prepared.append, measure)
        return [*raised.value.lines]

    problems = ["gone: no such directory", "damaged: its sha256 differs", "endless: its loss is not finite"]
    assert run("gone", "good", "damaged", "endless", "fine") == problems
    assert [title for _, title, *_ in stored] == ["good", "fine"]
    assert [location.title for location in prepared[0]] == ["good", "damaged", "endless", "fine"]
    assert capsys.readouterr().out == "good: measured good\nfine: measured fine\n"
    assert run("gone") == problems[:1] and len(prepared) == 1
    measuring.stop()  # as is done at the end of the process


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shared_results_keep_the_order_of_batches(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    done: list[int] = []

    def work(batch: int) -> int:
        done.append(batch)
        return 10 * batch

    def gathered(_: Any, work_of_rank: Callable[[], Any]) -> list[tuple[int, list[int]]]:
        shares = [(rank, [10 * batch for batch in range(rank, 7, size)]) for rank in range(size)]
        number, results = work_of_rank()
        assert (number, results) == shares[number]
        return shares[::-1]

    monkeypatch.setattr(measuring, "together", gathered)
    for rank in range(size):
        ranks: Any = SimpleNamespace(
            device=torch.device("cpu"), coordinates=rank == 0, data_parallel=SimpleNamespace(rank=rank, size=size)
        )
        assert measuring.share(ranks, range(7), work) == [0, 10, 20, 30, 40, 50, 60]
    assert sorted(done) == list(range(7))  # each batch was computed on only one rank


def test_error_on_one_rank_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(batch: int) -> int:
        raise BadInput(f"batch {batch}: no text")

    from_other_rank = (True, (1, [5]), None)  # the contribution of the other rank
    monkeypatch.setattr(
        process_group,
        "gather",
        lambda ranks, from_this_rank, group: [from_this_rank, from_other_rank][:: 1 - 2 * ranks.rank],
    )
    for rank, problem in ((0, "batch 0: no text"), (1, "batch 1: no text")):
        ranks: Any = SimpleNamespace(
            rank=rank, device=torch.device("cpu"), coordinates=True, data_parallel=SimpleNamespace(rank=rank, size=2)
        )
        with pytest.raises(BadInput, match=problem):
            measuring.share(ranks, range(3), work)
