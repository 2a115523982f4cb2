"""Throughput: entered or measured tokens/s first, else a roofline that published trainers meet."""

import json
from pathlib import Path

import attrs
import pytest

from model.config import GPT2_SIZES
from training.hardware.gpus import known_gpus
from training.planning.price_list import Machine
from training.planning.throughput import MEASUREMENTS, OURS, roofline, throughputs


@pytest.mark.parametrize(
    ("gpu", "size", "tokens_per_second"),
    [
        ("a100-80gb", "124M", 218e3),
        ("a100-80gb", "350M", 80e3),
        ("a100-80gb", "774M", 38.6e3),
        ("h100-80gb", "124M", 468e3),
        ("h100-80gb", "350M", 188e3),
        ("h100-80gb", "1.5B", 47.6e3),
    ],
)
def test_the_roofline_is_what_the_fastest_published_trainer_reached(
    gpu: str, size: str, tokens_per_second: float
) -> None:
    assert roofline(GPT2_SIZES[size], known_gpus()[gpu]) == pytest.approx(tokens_per_second, rel=0.05)


def test_what_is_entered_or_measured_goes_before_the_roofline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2_SIZES["124M"]
    machine = Machine(name="mine", gpu=known_gpus()["b200"], gpus=8, usd_per_hour=1.0)
    assert throughputs(config, attrs.evolve(machine, gpus=2))[0].source == "upper bound: roofline, not fitted"
    assert throughputs(config, machine)[0].trainer == "gpjt/ddp-base-model-from-scratch"
    rows = json.loads(MEASUREMENTS.read_text())
    own = rows[-1] | {"trainer": OURS, "tokens_per_second": 5e6}
    monkeypatch.setattr("training.planning.throughput.MEASUREMENTS", tmp_path / "rows.json")
    (tmp_path / "rows.json").write_text(json.dumps([*rows, own]))
    assert [row.tokens_per_second for row in throughputs(config, machine)] == [5e6, rows[-1]["tokens_per_second"]]
    assert throughputs(GPT2_SIZES["350M"], machine)[0].trainer is None
    entered = attrs.evolve(machine, tokens_per_second=6e6)
    assert attrs.astuple(throughputs(config, entered)[0]) == (6e6, "entered in the price list", None)
