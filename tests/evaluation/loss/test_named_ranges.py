"""Named ranges are downloaded without the dataset's training tokens."""

import json
from pathlib import Path
from typing import get_args

import attrs
import numpy as np
import pytest

from common.arguments import parse
from common.errors import BadInput, UsageError
from evaluation.command_line import LossCommand, RangeName
from evaluation.loss import token_range
from evaluation.loss.loss_measures import NAMED_RANGES
from evaluation.loss.token_range import Range, check_unseen
from evaluation.shared.model_location import locate
from tests.conftest import MakeRun, complete
from tests.evaluation.comparison.stored import refused
from tests.tokens.format.token_directory import write_llm_c


def test_named_range_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = []

    def download(dataset: str, directory: Path, train_tokens: int) -> None:
        downloads.append((dataset, train_tokens))
        directory.mkdir(parents=True)
        write_llm_c(directory / "fineweb_val_000000.bin", np.arange(1000, dtype=np.uint16))
        (directory / "download.json").write_text(json.dumps({"dataset": dataset}))

    named = attrs.evolve(NAMED_RANGES["fineweb-val-10m"], start=500, count=100)
    monkeypatch.setitem(NAMED_RANGES, "fineweb-val-10m", named)
    monkeypatch.setattr(token_range, "DOWNLOADS", tmp_path)
    monkeypatch.setattr(token_range, "download_dataset", download)
    span = token_range.choose_named("fineweb-val-10m", None, [])
    assert downloads == [(named.dataset, 0)] and set(NAMED_RANGES) == set(get_args(RangeName))  # no training tokens
    assert str(span) == f"fineweb-val-10m: {tmp_path / named.dataset}: validation, tokens 500 to 600"
    assert attrs.asdict(named).items() <= span.identity().items()


def test_directory_without_the_range_is_refused(make_run: MakeRun, token_files: Path, tmp_path: Path) -> None:
    run = make_run()
    complete(run, "--max-steps", "1")
    write_llm_c(tmp_path / "fineweb_val_000000.bin", np.arange(4000, dtype=np.uint16))
    command = ("loss", run, "--range", "fineweb-val-10m", "--tokens", tmp_path)
    assert "its validation stream has 4,000 tokens, wanted 10,485,760 tokens to predict after --from 0" in refused(
        *command
    )
    (tmp_path / "download.json").write_text(json.dumps({"dataset": "someone/else"}))
    assert "got dataset someone/else, wanted kjj0/fineweb10B-gpt2 for --range fineweb-val-10m" in refused(*command)


def test_named_range_refuses_a_start() -> None:
    line = "--from cannot be combined with --range: a published range has its own split, start and count"
    with pytest.raises(UsageError, match=line):
        parse("evaluate.py", {"loss": LossCommand}, ["loss", "m", "--range", "gpjt-test", "--from", "5"])


def test_validation_on_the_named_range_is_noted(
    make_run: MakeRun, token_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(validation_sequences=16)
    complete(run, "--max-steps", "1")
    span = Range(directory=token_files, split="validation", start=0, count=100, name="fineweb-val-10m")
    check_unseen(locate(str(run), None), span)
    assert "was validated on tokens 0 to 513 of fineweb-val-10m" in capsys.readouterr().err
    with pytest.raises(BadInput, match="was validated on tokens 0 to 513 of this split"):
        check_unseen(locate(str(run), None), attrs.evolve(span, name="gpjt-test"))


def test_named_ranges_match_the_published_tables() -> None:
    records, gpjt = (attrs.astuple(NAMED_RANGES[name]) for name in ("fineweb-val-10m", "gpjt-test"))
    assert records == ("kjj0/fineweb10B-gpt2", "validation", 0, 20 * 512 * 1024)  # 20 of the speedrun's batches
    assert gpjt == ("gpjt/fineweb-gpt2-tokens", "validation", 50_000_000, 19_660_800)
