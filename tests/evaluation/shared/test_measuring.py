"""Several models in one command: one that cannot be measured does not stop the others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import BadInput
from evaluation.command_line import LossCommand
from evaluation.shared import measuring


def test_a_bad_model_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, prepared = [], []

    def locate(reference: str, name: str | None) -> Any:
        if reference == "gone":
            raise BadInput("gone: no such directory")
        return SimpleNamespace(path=Path(reference), home=Path(reference), title=reference)

    def load(_: Any, place: Any, tokenizer: str | None) -> Any:
        if place.title == "damaged":
            raise BadInput("damaged: its sha256 differs")
        return SimpleNamespace(title=place.title, network=None)

    def measure(place: Any, _: Any, ranks: Any) -> tuple[dict[str, Any], str]:
        if place.title == "endless":
            raise BadInput("endless: its loss is not finite")
        return {"value": 1}, f" measured {place.title}"

    monkeypatch.setattr(measuring, "locate", locate)
    monkeypatch.setattr(measuring, "load_on_all", load)
    monkeypatch.setattr(measuring, "identity_of", lambda network, directory: None)
    monkeypatch.setattr(measuring, "append_result", lambda *values: stored.append(values))

    def run(*models: str) -> list[str]:
        command = LossCommand(models, device="cpu")
        with pytest.raises(BadInput) as raised:
            measuring.measure_each(command, "loss", prepared.append, measure)
        return [*raised.value.problems]

    problems = ["gone: no such directory", "damaged: its sha256 differs", "endless: its loss is not finite"]
    assert run("gone", "good", "damaged", "endless", "fine") == problems
    assert [title for _, title, *_ in stored] == ["good", "fine"]
    assert [place.title for place in prepared[0]] == ["good", "damaged", "endless", "fine"]
    assert capsys.readouterr().out == "good: measured good\nfine: measured fine\n"
    assert run("gone") == problems[:1] and len(prepared) == 1
    measuring.stop()  # as the end of the process does
