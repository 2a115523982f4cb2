"""The plan: units of about the requested size, always the same, stored and read back unchanged."""

import hashlib
import json
from pathlib import Path

import attrs
import pytest

from common.errors import BadInput
from tests.loopback import serve_files
from tests.tokens.documents.reading import SETTINGS
from tests.tokens.preparing import jsonl, texts_of, write
from tokens.documents.sources import resolve_sources
from tokens.prepare import prepare as prepare_module
from tokens.prepare.plan import UnitPlan, check_same, make_plan, read_plan, write_plan


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


def test_a_stored_plan_is_read_back_unchanged(tmp_path: Path) -> None:
    source = resolve_sources([str(jsonl(tmp_path / "a.jsonl", ["text"] * 9))])
    plan = make_plan(source, attrs.evolve(SETTINGS, validation_fraction=0, shard_tokens=7))
    write_plan(tmp_path, plan)
    stored_plan = read_plan(tmp_path)
    assert stored_plan == plan and stored_plan.fingerprint() == plan.fingerprint()
    check_same(tmp_path, stored_plan, plan.settings, source)
    with pytest.raises(BadInput, match=r"shard_tokens: got 8, wanted 7; repeat that command, or pass another --output"):
        check_same(tmp_path, stored_plan, attrs.evolve(plan.settings, shard_tokens=8), source)
    assert read_plan(tmp_path / "elsewhere") is None


def test_a_plan_of_older_rules_is_not_resumed(tmp_path: Path) -> None:
    now = write(tmp_path / "now", jsonl(tmp_path / "a.jsonl", ["x"]))
    plan = read_plan(tmp_path / "now")
    assert plan is not None
    values = attrs.asdict(attrs.evolve(plan, settings=attrs.evolve(plan.settings, version=1)))
    newer = ("version", "separator", "pattern", "structure", "special_tokens", "template", "context_length")
    for name in newer:  # version 1 of the rules did not write these fields
        del values["settings"][name]
    fingerprint = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    (tmp_path / "now" / "plan.json").write_text(json.dumps({"format": 1, "fingerprint": fingerprint, **values}))
    older = read_plan(tmp_path / "now")
    assert older is not None and older.fingerprint() == fingerprint != now.plan
    with pytest.raises(
        BadInput, match=r"plan\.json: was written by an earlier version of prepare_data\.py; pass another"
    ):
        write(tmp_path / "now", tmp_path / "a.jsonl")


def records_of(directory: Path) -> str:
    return "".join(path.read_text() for path in directory.iterdir() if path.suffix in (".json", ".jsonl"))


@pytest.mark.parametrize("earlier_version", [False, True])
def test_a_preparation_resumes_with_a_newly_signed_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier_version: bool
) -> None:
    """Each command gets a newly signed URL. A plan from an earlier version contains the URL with its secrets."""
    (tmp_path / "web").mkdir()
    jsonl(tmp_path / "web" / "a.jsonl", ["one", "two"])
    with (tmp_path / "web" / "a.jsonl").open("a") as file:
        file.write("damaged\n")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with serve_files(tmp_path / "web") as server:
        address = server.url.replace("://", "://me:hunter2@")
        with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
            killed.setattr(prepare_module, "_compute", stop)
            if earlier_version:
                killed.setattr(UnitPlan, "recorded", property(lambda plan: plan))
            write(tmp_path / "out", f"{address}/a.jsonl?sig=hunter2first&name=.jsonl")  # type: ignore[arg-type]
        assert ("hunter2" in records_of(tmp_path / "out")) == earlier_version
        write(tmp_path / "out", f"{address}/a.jsonl?sig=hunter2second&name=.jsonl")  # type: ignore[arg-type]
        if not earlier_version:
            assert "hunter2" not in records_of(tmp_path / "out")
        assert "hunter2" not in (tmp_path / "out" / "manifest.json").read_text()
        assert texts_of(tmp_path / "out", "train") == ["one", "two"]
        with pytest.raises(
            BadInput, match=r"another command started this preparation: .* was among its sources, but is missing"
        ):
            write(tmp_path / "out", f"{server.url}/a.jsonl?name=.jsonl")  # type: ignore[arg-type]
