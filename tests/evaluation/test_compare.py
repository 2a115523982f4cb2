"""A comparison is read from what was kept, and names a better model only outside the noise."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from evaluation import intervals
from evaluation.comparison.compare import compare, verdict
from evaluation.comparison.measures import MEASURES, decides
from evaluation.comparison.published import GPJT_RANGE
from evaluation.comparison.rows import read_rows
from evaluation.intervals import Interval, paired_intervals, student_quantile
from evaluation.ratio import in_groups, ratio
from evaluation.results import append_result
from tests import launch
from tests.conftest import ROOT, train, write_run
from tests.evaluation.test_intervals import session
from tests.tokens.test_prepare import PREPARE, run

HELD_OUT, JUDGED = MEASURES[0], MEASURES[-1]
JUDGE = {"judge": "judge-1", "orders": 3, "seeds": 3, "questions": {"count": 110, "sha256": "q"}}
DATA = {"file": "instructions.json", "sha256": "i", "train": 935, "validation": 55, "test": 110}


def evaluate(*arguments: str | Path, environment: dict[str, str] | None = None) -> Any:
    return launch.run(ROOT / "evaluate.py", *map(str, arguments), environment=environment)


def said(*arguments: str | Path, environment: dict[str, str] | None = None) -> str:
    done = evaluate("compare", *arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cells(markdown: str) -> dict[str, dict[str, str]]:
    """Return a table in markdown by model and column."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if "|" in line]
    return {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[2:]}


def kept(home: Path, kind: str = "loss") -> dict[str, Any]:
    lines = [json.loads(line) for line in (home / "evaluations.jsonl").read_text().splitlines()]
    return [line for line in lines if line["evaluation"] == kind][-1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of 3 and 8 steps, and one of 8 steps with another seed, measured on 200 documents and more."""
    folder = tmp_path_factory.mktemp("compared")
    pieces = "\n".join(path.read_text() for path in sorted((ROOT / "training").glob("*.py"))).split("\n\n")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    options = ("--tokenizer", "bytes", "--validation-fraction", "0.5", "--output", folder / "tokens")
    assert run(PREPARE, folder / "text.jsonl", *options).returncode == 0
    made = {
        name: write_run(folder / name, folder / "tokens", random_seed=seed)
        for name, seed in (("short", 1), ("long", 1), ("other", 2))
    }
    for name, directory in made.items():
        done = train(directory, "--price-per-hour", "3600", *(["--max-steps", "3"] if name == "short" else []))
        assert done.returncode == 0, done.stderr
    measured = evaluate("loss", *made.values(), "--from", "1000", "--count", "40000", "--device", "cpu")
    assert measured.returncode == 0, measured.stderr
    return made


def test_what_trained_longer_is_better_and_a_copy_is_not(runs: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs["long"], copy, symlinks=True)
    shown = said(runs["short"], runs["long"], "--markdown")
    short, long = "short step-00000003", "long step-00000008"
    assert f"- held-out loss: {long} is better than {short} by " in shown
    table = cells(shown)
    state = json.loads((runs["long"] / "checkpoints" / "best" / "state.json").read_text())
    result = kept(runs["long"])
    assert table[long] == {
        "model": long,
        "tokens": "2,048",
        "hours": "0.00",
        "dollars": f"{state['elapsed_seconds']:,.2f}",
        "validation loss": f"{state['validation_loss']:.4f}",
        "held-out loss": f"{result['nats_per_token']:.4f} ± {result['nats_per_token_error']:.4f}",
        "bits/byte": f"{result['bits_per_byte']:.4f} ± {result['bits_per_byte_error']:.4f}",
    }
    assert table["OpenAI GPT-2 small, published"]["held-out loss"] == "3.500 [1]"
    assert "[1] gilesthomas.com" in shown and "not the text that is measured here" in shown
    assert "no model is called better or worse than them" in shown
    assert "train a run again with another random_seed" in shown
    same = said(runs["long"], copy, "--markdown")
    assert f"{copy}: {long} are not told apart: 0.0000 [0.0000, 0.0000]" in same


def test_pairs_on_the_same_text_know_more_than_each_alone(runs: dict[str, Path]) -> None:
    one, other = kept(runs["long"]), kept(runs["other"])
    sizes = np.array(one["groups"]["tokens"], float)
    assert len(sizes) > 100
    nats = [np.array(result["groups"]["nats"]) for result in (one, other)]
    paired, alone = ratio(nats[0] - nats[1], sizes)[1], [ratio(values, sizes)[1] for values in nats]
    assert paired is not None
    assert paired < 0.7 * np.hypot(*alone)


def test_runs_that_differ_in_their_seed_show_the_noise_and_are_not_told_apart(runs: dict[str, Path]) -> None:
    shown = said(*runs.values(), "--markdown")
    losses = sorted(kept(runs[name])["nats_per_token"] for name in ("long", "other"))
    deviation = (losses[1] - losses[0]) / 2**0.5
    assert "- Seed noise, held-out loss: long step-00000008, other step-00000008 from " in shown
    told = f"from {losses[0]:.4f} to {losses[1]:.4f}; standard deviation {deviation:.4f}, which is in the intervals of"
    assert told in shown
    assert "- held-out loss: long step-00000008 and other step-00000008 are not told apart: " in shown
    assert "By how much is not known here" not in shown


def test_equal_models_are_not_told_apart_19_times_in_20() -> None:
    draw = np.random.default_rng(0)
    winners = 0
    for _ in range(200):
        tokens = draw.integers(50, 2000, 300).astype(float)
        hardness = draw.normal(3.5, 0.6, 300)
        results = []
        for _ in range(2):
            nats = (hardness + draw.normal(0, 0.1, 300)) * tokens
            groups = in_groups(nats, tokens, tokens)
            total = {"nats_per_token": nats.sum() / tokens.sum()}
            results.append({"groups": {"nats": groups.nats, "tokens": groups.tokens}, **total})
        assert HELD_OUT.difference is not None
        found = HELD_OUT.difference(*results, 0.95)
        assert found is not None
        winners += "is better" in verdict(HELD_OUT, ("a", "b"), found)
    assert 3 <= winners <= 18  # 10 of 200


def write(home: Path, kind: str, **values: Any) -> Path:
    append_result(home, home.name, kind, values)
    return home


def hits(numbers: set[int], items: int) -> str:
    return np.packbits([number in numbers for number in range(items)]).tobytes().hex()


def hellaswag(home: Path, right: set[int], items: int = 1000) -> Path:
    score = {"acc": 0, "acc_error": 0, "acc_norm": len(right) / items, "acc_norm_error": 0.015, "hits": ""}
    style = {**score, "hits_norm": hits(right, items)}
    data = {"file": "hellaswag_val.jsonl", "sha256": "h"}
    return write(home, "hellaswag", data=data, items=items, cut=0, completion=style, lm_eval=style)


def judged(home: Path, score: list[float], differences: list[dict[str, Any]], **more: Any) -> Path:
    value = dict(zip(("value", "low", "high"), score, strict=True))
    return write(home, "judge", **(JUDGE | more), score=value, differences=differences)


def instructed(home: Path, chrf: float, spread: float | None, errors: list[float | None]) -> Path:
    seeds = [{"chrf_error": error, "reference_loss_error": None} for error in errors]
    none = {"value": None, "spread": None}
    return write(home, "instruct", data=DATA, seeds=seeds, chrf={"value": chrf, "spread": spread}, reference_loss=none)


def test_items_are_compared_one_by_one(tmp_path: Path) -> None:
    a = hellaswag(tmp_path / "a", set(range(300)))
    b = hellaswag(tmp_path / "b", set(range(330)))  # right wherever a is
    c = hellaswag(tmp_path / "c", set(range(400, 730)))
    found = compare(read_rows([str(a), str(b)]))
    # 30 of 1000 differ: 0.03 ± t * sqrt(0.03 * 0.97 / 999)
    assert "HellaSwag, completion: b is better than a by 0.0300 [0.0194, 0.0406] of all items" in found.statements
    apart = compare(read_rows([str(a), str(c)])).statements
    assert any("a and c are not told apart: -0.0300" in line for line in apart)  # the same means, other items
    row = dict(zip(found.columns, (cell.text for cell in found.rows[0]), strict=True))
    assert row["HellaSwag, completion"] == "0.3000 ± 0.0150"
    assert [row[0].text for row in found.rows[2:]] == ["OpenAI GPT-2 small, published", "OpenAI GPT-2 XL, published"]


def test_scores_of_other_sessions_are_shown_apart_and_never_compared(tmp_path: Path) -> None:
    clear = [{"a": "a", "b": "b", "value": -4.0, "low": -7.0, "high": -1.0}]
    a, b = judged(tmp_path / "a", [20, 17, 23], clear), judged(tmp_path / "b", [24, 21, 27], clear)
    c = judged(tmp_path / "c", [90, 85, 95], [{"a": "c", "b": "d", "value": 50, "low": 40, "high": 60}])
    found = compare(read_rows([str(c), str(b), str(a)]))
    assert found.statements == ["judge's score: b is better than a by 4.00 [1.00, 7.00] points"]
    shown = {row[0].text: row[-1].text for row in found.rows}
    assert shown["b"] == "24.00 [21.00, 27.00]"
    assert shown["c"] == "90.00 [85.00, 95.00] [a]"
    assert shown["OpenAI GPT-2 medium, published"] == "38.53 [1]"
    assert any(note.startswith("[a] not comparable with the others: judge: 110 questions") for note in found.notes)


def test_equal_models_that_differ_by_fine_tuning_are_not_told_apart_by_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("DRAWS", "CHUNK"):
        monkeypatch.setattr(intervals, name, 500)
    draw = np.random.default_rng(0)
    found = [paired_intervals(session(draw, (2, 1, 110), seed_deviation=1.7))[1][0, 1] for _ in range(100)]
    assert sum(one.apart for one in found) > 7  # the interval alone would
    decisive = decides({"evaluation": "judge", "seeds": 1})
    assert not any("is better" in verdict(JUDGED, ("a", "b"), one, decisive=decisive) for one in found)


def test_of_one_fine_tuning_each_the_judge_finds_nobody_better(tmp_path: Path) -> None:
    clear = [{"a": "a", "b": "b", "value": -4.0, "low": -7.0, "high": -1.0}]
    homes = [judged(tmp_path / name, [20, 17, 23], clear, seeds=1) for name in "ab"]
    found = compare(read_rows(list(map(str, homes))))
    assert found.statements == [
        "judge's score: a and b are not told apart by one fine-tuning each: -4.00 [-7.00, -1.00] points"
    ]
    assert any("95 % intervals over questions only, of one fine-tuning each" in note for note in found.notes)


def test_judged_runs_in_folders_of_one_name_are_found_by_what_the_session_calls_them(tmp_path: Path) -> None:
    names = ["run (/one)", "run (/two)"]
    clear = [{"a": names[1], "b": names[0], "value": 4.0, "low": 1.0, "high": 7.0}]
    one, two = (
        judged(tmp_path / place / "run", [20, 17, 23], clear, candidate=name)
        for place, name in zip(("one", "two"), names, strict=True)
    )
    found = compare(read_rows([str(one), str(two)]))
    assert found.statements == [f"judge's score: {two}: run is better than {one}: run by 4.00 [1.00, 7.00] points"]


def test_with_seed_noise_intervals_still_hold_for_all_pairs_together(tmp_path: Path) -> None:
    rows = read_rows(
        [str(hellaswag(tmp_path / name, set(range(count)))) for name, count in (("a", 300), ("b", 330), ("c", 600))]
    )
    rows = [
        attrs.evolve(row, recipe=recipe, seed=seed)
        for row, (recipe, seed) in zip(rows, [("r", 1), ("r", 2), ("s", 1)], strict=True)
    ]
    confidence = 1 - 0.05 / 3
    text = student_quantile((1 + confidence) / 2, 999) * (0.03 * 0.97 / 999) ** 0.5
    seeds = student_quantile((1 + confidence) / 2, 1) * 0.03  # sqrt(2) * standard deviation of two
    reach = math.hypot(text, seeds)
    line = f"a and b are not told apart: -0.0300 [{-0.03 - reach:.4f}, {-0.03 + reach:.4f}] of all items"
    assert f"HellaSwag, completion: {line}" in compare(rows).statements


def test_published_losses_are_of_the_same_tokens_only_on_that_range(tmp_path: Path) -> None:
    span = {"tokens": "token_files/fineweb", "sha256": "s", **GPJT_RANGE}
    scores = {
        "nats_per_token": 3.4,
        "bits_per_byte": 1.1,
        "groups": {"nats": [34.0], "tokens": [10], "text_bytes": [40]},
    }
    a = write(tmp_path / "a", "loss", range=span, **scores)
    b = write(tmp_path / "b", "loss", range=span | {"start": 0}, **scores)
    same, other = (next(note for note in compare(read_rows([str(home)])).notes if "[1]" in note) for home in (a, b))
    assert "the same tokens as here" in same
    assert "not the text that is measured here" in other


def test_what_most_models_share_is_shown_rather_than_what_is_newest(tmp_path: Path) -> None:
    a, b = hellaswag(tmp_path / "a", {1}), hellaswag(tmp_path / "b", {1})
    hellaswag(b, {1, 2}, items=2000)
    found = compare(read_rows([str(a), str(b)]))
    assert found.statements[0].startswith("HellaSwag, completion: a and b are not told apart: 0.0000")


def test_fine_tuned_answers_are_shown_and_never_ranked(tmp_path: Path) -> None:
    homes = [
        instructed(tmp_path / "a", 21.5, 0.5, [1.25, 1.15]),  # 1.2, and 0.5 / sqrt(2) over seeds
        instructed(tmp_path / "b", 31.5, None, [1.2]),
        instructed(tmp_path / "c", 41.5, None, [None]),
    ]
    found = compare(read_rows(list(map(str, homes))))
    assert (found.columns, found.statements) == (["model", "chrF"], [])
    assert [row[1].text for row in found.rows] == ["21.50 ± 1.25", "31.50 ± 1.20", "41.50"]
    assert "± is a standard error over questions, and over fine-tuning seeds where there are several" in found.notes[0]


def test_without_an_interval_nobody_is_better() -> None:
    alone = verdict(HELD_OUT, ("a", "b"), Interval(value=-3, low=None, high=None))
    assert alone.startswith("a and b are not told apart: -3.0000 nats a token, with no interval")


def test_the_page_needs_nothing_else_and_hides_nothing(runs: dict[str, Path], tmp_path: Path) -> None:
    evil = tmp_path / "<script>"
    shutil.copytree(runs["long"], evil, symlinks=True)
    (evil / "evaluations.jsonl").write_text(json.dumps(kept(evil) | {"model": "<script> step-00000008"}) + "\n")
    shown = said(runs["short"], evil, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page and "http" not in page
    assert "&lt;script&gt; step-00000008 is better than short" in page
    assert page.count("<svg") == 4  # loss and bits a byte of both
    assert "prefers-color-scheme: dark" in page
    line = next(line for line in shown.splitlines() if line.startswith("bits/byte"))
    assert all(value in page for value in line.split()[1:])


def test_a_terminal_shows_whole_models_side_by_side_as_many_as_fit(runs: dict[str, Path], tmp_path: Path) -> None:
    far = tmp_path / ("a-long-name-" * 6)
    shutil.copytree(runs["long"], far, symlinks=True)
    shown = said(*runs.values(), far, environment={"COLUMNS": "80"})
    assert max(map(len, shown.splitlines())) <= 80 + len(str(far))  # a path is not broken
    tables, _, _ = shown.partition("held-out loss: ")
    assert max(map(len, tables.splitlines())) <= 80
    rows = [line for line in tables.splitlines() if line.startswith("held-out loss")]
    assert len(rows) > 1
    for home in runs.values():
        assert sum(f"{kept(home)['nats_per_token']:.4f} ±" in row for row in rows) >= 1


def test_a_checkpoint_and_torn_or_unknown_lines(runs: dict[str, Path], tmp_path: Path) -> None:
    home = tmp_path / "run"
    shutil.copytree(runs["long"], home, symlinks=True)
    with (home / "evaluations.jsonl").open("a") as file:
        file.write(
            '{"evaluation": "poetry", "model": "long step-00000008"}\n[1]\n{"evaluation": "loss", "model": "x"}\n'
        )
        file.write(json.dumps(kept(home) | {"model": "long step-00000004"}) + '\n{"evaluation": "lo')
    assert "long step-00000004" in said(home, "--markdown")  # the newest
    assert "long step-00000008" in said(home / "checkpoints" / "step-00000008", "--markdown")


def test_one_process_s_work_is_not_done_by_every_rank(tmp_path: Path) -> None:
    for command in ("compare", "export"):
        done = evaluate(command, tmp_path / "run", tmp_path / "new", environment={"WORLD_SIZE": "2"})
        assert done.returncode == 1
        said = f"evaluate.py: {command}: got 2 processes of torchrun, wanted one: python evaluate.py {command}\n"
        assert done.stderr == said


def test_what_cannot_be_compared_is_one_line(runs: dict[str, Path], tmp_path: Path) -> None:
    def refused(*arguments: str | Path) -> str:
        done = evaluate("compare", *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        return done.stderr

    a = hellaswag(tmp_path / "a", {1})
    broken = tmp_path / "broken"
    shutil.copytree(runs["long"], broken)
    (broken / "checkpoints" / "step-00000008" / "state.json").write_text("")
    assert "state.json: not JSON" in refused(broken)
    assert "long step-00000008, a: no overlap between result files" in refused(runs["long"], a)
    (tmp_path / "empty").mkdir()
    assert "got no results of" in refused(tmp_path / "empty")
    assert "got no results of" in refused(tmp_path / "absent")
    assert "--html" in refused(a, "--html", tmp_path / "absent" / "page.html")
