"""The table of GPUs can be searched by name or by torch's device name, and a price list can extend it."""

import json
from pathlib import Path

import pytest

from common.errors import BadInput
from training.hardware.gpus import find_gpu, known_gpus, named_gpus, read_gpus
from training.planning.price_list import gpus_of

EXAMPLE = {"memory_gib": 31.3, "bf16_tflops": 209.5, "gb_per_second": 1792}


def test_device_names_match_by_complete_words() -> None:
    peaks = {
        "NVIDIA A100-SXM4-40GB": 312e12,
        "NVIDIA A100 80GB PCIe": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 NVL": 835e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA GB200": 2500e12,
        "NVIDIA GeForce RTX 3090": 71e12,
        "NVIDIA GeForce RTX 3090 Ti": 80e12,
        "NVIDIA RTX A6000": 154.8e12,
        "NVIDIA L4": 121e12,
    }
    assert {name: named_gpus(name)[0].peak_flops for name in peaks} == peaks
    unknown = ("NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla T4", "a stranger")
    for name in (*unknown, "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA H100 80GB HBM3 MIG 1c.2g.20gb"):
        assert named_gpus(name) == []
    # The table has two GPUs with this torch name, which differ in the size of their memory.
    assert {gpu.memory_gib > 45 for gpu in named_gpus("NVIDIA A100-SXM4-40GB")} == {True, False}


def test_unknown_gpus_get_the_nearest_name() -> None:
    for name, suggestion in (("a100-80bg", "'a100-80gb'"), ("l40", "'l40s-48gb'"), ("h20", "'h200'")):
        with pytest.raises(BadInput, match=rf"unknown GPU '{name}'; did you mean {suggestion}\?"):
            find_gpu(name, known_gpus())


def test_price_lists_add_and_replace_gpus(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"gpus": {"mine": EXAMPLE, "l4": EXAMPLE}}))
    gpus = gpus_of(tmp_path / "mine.json")
    assert gpus.keys() == known_gpus().keys() | {"mine"}
    assert gpus["l4"].memory_gib == EXAMPLE["memory_gib"] != known_gpus()["l4"].memory_gib


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (7, "got 7, wanted an object of keys and values"),
        ({"memory": 1}, "unknown key 'memory'; did you mean 'memory_gib'?"),
        ({}, "key 'memory_gib' is missing; wanted memory_gib"),
        (EXAMPLE | {"memory_gib": 0}, "memory_gib: got 0, wanted a number above 0"),
        (EXAMPLE | {"similar_to": "v100"}, 'similar_to: got \'v100\', wanted "a100" or "h100"'),
    ],
)
def test_invalid_rows_are_refused_with_their_name(row: object, problem: str) -> None:
    with pytest.raises(BadInput) as raised:
        read_gpus(Path("mine.json"), {"mine": row})
    assert str(raised.value).startswith(f"mine.json: mine: {problem}")
