"""Plan of a ladder: what it will cost."""

import json
from pathlib import Path

import pytest

from experiments.ladder.ladder_file import read_ladder
from experiments.ladder.trunk import TrunkMaker
from experiments.ladder.trunk_training import describe_plan
from tests.experiments.ladder.conftest import MakeLadder


def test_time_and_cost_are_those_of_runs_that_have_ended(make_ladder: MakeLadder, tmp_path: Path) -> None:
    maker = TrunkMaker(ladder=read_ladder(make_ladder()), output=tmp_path / "out", ranks=1)
    assert describe_plan(maker, 2.0)[-1].startswith("time and cost: not known before a run of this ladder has ended")
    [trunk] = maker.trunks(maker.ladder.sizes[0], 0.01)
    trunk.directory.mkdir(parents=True)
    (trunk.directory / "model.json").write_text(json.dumps(trunk.horizons[-1].sections["model"]))
    (trunk.directory / "train.json").write_text(json.dumps(trunk.horizons[-1].sections["train"]))
    lines = [
        {"event": "end", "step": 9, "sources": [{"tokens": 7200}]},
        {"ledger": {"compile": 0}, "run_ledger": {"compile": 0}, "elapsed_seconds": 3600.0},
    ]
    (trunk.directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    line = describe_plan(maker, 2.0)[-1]
    hours, dollars = line.split(" hours, $")
    assert float(dollars.split()[0].replace(",", "")) == pytest.approx(2 * float(hours), rel=0.01)
    assert "at the FLOP/s of 1 earlier run;" in line
