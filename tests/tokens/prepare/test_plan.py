"""The plan: units of about the wanted size, the same whoever makes it, kept and read back unchanged."""

import hashlib
import json
from pathlib import Path

import attrs
import pytest

from common.errors import BadInput
from tests.tokens.documents.reading import SETTINGS
from tests.tokens.preparing import jsonl, texts_of, write
from tokens.documents.sources import resolve_sources
from tokens.prepare.plan import check_same, make_plan, read_plan, write_plan


def test_units_cover_every_byte_once_and_in_order(tmp_path: Path) -> None:
    for name, count in (("a", 50), ("b", 3), ("c", 200)):
        jsonl(tmp_path / f"{name}.jsonl", ["some text"] * count)
    plan = make_plan(resolve_sources([str(tmp_path)]), attrs.evolve(SETTINGS, unit_bytes=500))
    position = {number: 0 for number in range(3)}
    for unit, size in zip(plan.units, plan.unit_bytes, strict=True):
        assert sum(extent.end - extent.begin for extent in unit) == size <= 750
        for extent in unit:
            assert extent.begin == position[extent.input]
            position[extent.input] = extent.end
    assert list(position.values()) == [item.size_bytes for item in plan.inputs]
    assert len(plan.units) > 3


def test_a_kept_plan_is_read_back_with_its_fingerprint(tmp_path: Path) -> None:
    source = resolve_sources([str(jsonl(tmp_path / "a.jsonl", ["text"] * 9))])
    plan = make_plan(source, attrs.evolve(SETTINGS, validation_fraction=0, shard_tokens=7))
    write_plan(tmp_path, plan)
    kept = read_plan(tmp_path)
    assert kept == plan and kept.fingerprint() == plan.fingerprint()
    check_same(tmp_path, kept, plan.settings, source)
    with pytest.raises(BadInput, match=r"shard_tokens: got 8, wanted 7; repeat that command, or pass another --output"):
        check_same(tmp_path, kept, attrs.evolve(plan.settings, shard_tokens=8), source)
    assert read_plan(tmp_path / "elsewhere") is None


def test_a_preparation_of_the_older_rules_goes_on_by_them(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in (9, 10):
        jsonl(tmp_path / "texts" / f"{number}.jsonl", [f"{number}", "", "x"])
    options = {"split": "hash", "validation_fraction": 0.4, "split_seed": 13}  # the hash of "" falls to validation
    now = write(tmp_path / "now", tmp_path / "texts", **options)
    plan = read_plan(tmp_path / "now")
    assert plan is not None
    sources = [attrs.evolve(plan.sources[0], inputs=plan.inputs[::-1])]
    older = make_plan(sources, attrs.evolve(plan.settings, version=1))
    values = attrs.asdict(older)
    newer = ("version", "separator", "pattern", "special_tokens", "template", "context_length")
    for name in newer:  # which that version did not write
        del values["settings"][name]
    fingerprint = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    (tmp_path / "then").mkdir()
    (tmp_path / "then" / "plan.json").write_text(json.dumps({"format": 1, "fingerprint": fingerprint, **values}))
    then = write(tmp_path / "then", tmp_path / "texts", **options)
    assert then.plan == fingerprint != now.plan
    texts = {name: [texts_of(tmp_path / name, split) for split in ("train", "validation")] for name in ("now", "then")}
    assert texts == {"now": [["9", "", "x", "", "x"], ["10"]], "then": [["x", "9", "x"], ["10", "", ""]]}
