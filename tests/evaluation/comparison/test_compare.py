"""A comparison is read from what was kept, and names a better model only outside the noise."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from evaluation.comparison.compare import compare
from evaluation.comparison.measures import MEASURES, Measure
from evaluation.comparison.published import GPJT_RANGE
from evaluation.comparison.rows import read_rows
from evaluation.comparison.seed_noise import Group, SeedNoise
from evaluation.comparison.winners import Pair, verdict
from evaluation.shared import intervals
from evaluation.shared.intervals import Interval, paired_intervals, student_quantile
from evaluation.shared.ratio import in_groups, ratio
from evaluation.shared.results import append_result
from tests import launch
from tests.conftest import ROOT, seal_again, train, write_run
from tests.evaluation.shared.test_intervals import session
from tests.tokens.preparing import PREPARE, run

HELD_OUT, JUDGED = MEASURES[0], MEASURES[-1]
JUDGE = {"judge": "judge-1", "orders": 3, "seeds": 3, "questions": {"count": 110, "sha256": "q"}}
DATA = {"file": "instructions.json", "sha256": "i", "train": 935, "validation": 55, "test": 110}


def evaluate(*arguments: str | Path, environment: dict[str, str] | None = None) -> Any:
    return launch.run(ROOT / "evaluate.py", *map(str, arguments), environment=environment)


def said(*arguments: str | Path, environment: dict[str, str] | None = None) -> str:
    done = evaluate("compare", *arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pair(measure: Measure, deviation: float | None = 1.0, **result: Any) -> Pair:
    """Return two models, a and b, for a verdict; a deviation of None: the seed noise is not known."""
    a, b = (Group(labels=[name], results=[{"evaluation": measure.kind, **result}]) for name in "ab")
    noise = None if deviation is None else SeedNoise(deviation=deviation, freedom=4)
    return Pair(measure=measure, groups=(a, b), noise=noise)


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
    shown = said(runs["short"], runs["long"], "--markdown", "--seed-deviation", "0.01")
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
    assert "published" not in "".join(table)
    assert "Published losses of OpenAI's GPT-2 are left out: they are nats a GPT-2 token of FineWeb" in shown
    assert "- Seed noise, held-out loss: standard deviation 0.01, as --seed-deviation states" in shown
    alone = said(runs["short"], runs["long"], "--markdown")
    assert "better" not in alone.partition("held-out loss: ")[2].partition("\n")[0]
    assert f"- held-out loss: {short} is above {long} by " in alone
    assert "no winner: the seed noise is not known" in alone and "or state it: --seed-deviation NATS" in alone
    same = said(runs["long"], copy, "--markdown")
    assert f"{runs['long']}: {long}, {copy}: {long} are one recipe: what they differ by is noise" in same


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
    assert "- Seed noise, held-out loss: long step-00000008, other step-00000008 (2 seeds) from " in shown
    told = f"from {losses[0]:.4f} to {losses[1]:.4f}; standard deviation {deviation:.4f}, 1 degree of freedom"
    assert told in shown
    assert (
        "- held-out loss: long step-00000008, other step-00000008 (2 seeds) are one recipe: what they differ by"
        in shown
    )
    assert "seed noise is not known" not in shown


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
        found = HELD_OUT.difference(results[:1], results[1:], 0.95)
        assert found is not None
        winners += "is better" in verdict(pair(HELD_OUT), found)
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
    # 30 of 1000 differ, and one half more each way: 0.03 ± t * sqrt((31 / 1002 - (30 / 1002)**2) / 1001)
    told = "HellaSwag, completion: a is below b by 0.0300 [0.0192, 0.0408] of all items; no winner"
    assert any(line.startswith(told) for line in found.statements)
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
    told = "b is above a by 4.00 [1.00, 7.00] points; no winner: the seed noise is not known"
    assert found.statements == [f"judge's score: {told}"]
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
    assert not any("is better" in verdict(pair(JUDGED, seeds=1), one) for one in found)
    assert any("is better" in verdict(pair(JUDGED, seeds=2), one) for one in found)


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
    assert found.statements[0].startswith(f"judge's score: {one}: run is below {two}: run by 4.00 [1.00, 7.00] points")


def test_with_seed_noise_intervals_hold_for_all_pairs_of_recipes_together(tmp_path: Path) -> None:
    counts = {"a": 300, "b": 330, "c": 420, "d": 800}
    rows = read_rows([str(hellaswag(tmp_path / name, set(range(count)))) for name, count in counts.items()])
    rows = [
        attrs.evolve(row, recipe=recipe, seed=seed)
        for row, (recipe, seed) in zip(rows, [("r", 1), ("r", 2), ("s", 1), (None, None)], strict=True)
    ]
    found = compare(rows).statements
    # Of three pairs one is found to differ or none is: c and a with b by their mean, 0.105
    confidence, value, square = 1 - 0.05 / 3, 0.105, (30 * 0.5**2 + 90 + 1) / 1002
    text = student_quantile((1 + confidence) / 2, 999) * ((square - (105 / 1002) ** 2) / 1001) ** 0.5
    seeds = student_quantile((1 + confidence) / 2, 1) * 0.03 / 2**0.5 * 1.5**0.5
    reach = math.hypot(text, seeds)
    line = f"a, b (2 seeds) and c are not told apart: -0.1050 [{-value - reach:.4f}, {-value + reach:.4f}] of all items"
    assert f"HellaSwag, completion: {line}" in found
    assert "HellaSwag, completion: a, b (2 seeds) are one recipe: what they differ by is noise" in found


def test_without_an_item_on_which_two_models_disagree_the_interval_still_has_a_width(tmp_path: Path) -> None:
    homes = [str(hellaswag(tmp_path / name, set(range(300)))) for name in "ab"]
    told = "HellaSwag, completion: a and b are not told apart: 0.0000 [-0.0020, 0.0020] of all items"
    assert told in compare(read_rows(homes)).statements


def losses_on(home: Path, **span: Any) -> Path:
    scores = {
        "nats_per_token": 3.4,
        "bits_per_byte": 1.1,
        "groups": {"nats": [34.0], "tokens": [10], "text_bytes": [40]},
    }
    return write(home, "loss", range={"tokens": "token_files/fineweb", "sha256": "s"} | span, **scores)


def test_published_losses_stand_only_beside_losses_of_the_same_tokens(tmp_path: Path) -> None:
    same = losses_on(tmp_path / "a", **GPJT_RANGE)
    other = hellaswag(losses_on(tmp_path / "b", **GPJT_RANGE | {"start": 0}), {1})
    found = [compare(read_rows([str(home)])) for home in (same, other)]
    published = [{row[0].text: row[1].text for row in one.rows[1:]} for one in found]
    assert published[0]["OpenAI GPT-2 medium, published"] == "3.231 [1]"
    assert published[1] == {"OpenAI GPT-2 small, published": "", "OpenAI GPT-2 XL, published": ""}  # of HellaSwag
    assert not any("left out" in note for note in found[0].notes)
    assert any(note.startswith("Published losses of OpenAI's GPT-2 are left out") for note in found[1].notes)


def test_a_session_with_prompts_left_out_does_not_take_the_place_of_a_whole_one(tmp_path: Path) -> None:
    whole = [{"a": "a", "b": "b", "value": -4.0, "low": -7.0, "high": -1.0}]
    half = [{"a": "a", "b": "b", "value": 9.0, "low": 8.0, "high": 10.0}]
    homes = [judged(tmp_path / name, [20, 17, 23], whole, left_out=0) for name in "ab"]
    for home in homes:
        judged(home, [50, 47, 53], half, left_out=144, time="2999-01-01T00:00:00+00:00")
    found = compare(read_rows(list(map(str, homes))))
    assert "by 4.00" in found.statements[0]
    told = "judge: a newer session of judge-1, 2999-01-01T00:00:00+00:00, is not shown: 144 prompts were left out of it"
    assert found.notes.count(told) == 1
    alone = [judged(tmp_path / name, [50, 47, 53], half, left_out=144) for name in "cd"]
    notes = compare(read_rows(list(map(str, alone)))).notes
    assert any("144 prompts of which were left out for all models alike" in note for note in notes)


def test_tasks_of_the_harness_are_columns_and_never_ranked(tmp_path: Path) -> None:
    def asked(name: str, **tasks: dict[str, float]) -> str:
        how = {"lm_eval": "0.4.13", "fewshot": None, "limit": None, "batch_size": 16}
        return str(write(tmp_path / name, "harness", **how, tasks=tasks))

    arc = {"sample_len": 2376, "acc": 0.4383, "acc_stderr": 0.0102, "acc_norm": 0.3948, "acc_norm_stderr": 0.01}
    a = asked("a", arc_easy=arc, lambada={"sample_len": 5153, "perplexity": 40.05})
    b = asked("b", arc_easy=arc | {"acc": 0.5}, broken={"sample_len": 1, "acc": None})
    found = compare(read_rows([a, b]))
    assert found.columns == ["model", "arc_easy, acc", "arc_easy, acc_norm", "lambada, perplexity"]
    assert [cell.text for cell in found.rows[1]] == ["b", "0.5000 ± 0.0102", "0.3948 ± 0.0100", ""]
    assert found.statements == []
    assert any(
        note.startswith("harness arc_easy: lm-evaluation-harness 0.4.13 on 2,376 documents") for note in found.notes
    )


def test_a_recipe_is_all_that_changes_a_result_but_the_seed(runs: dict[str, Path], tmp_path: Path) -> None:
    def recipe(**train: Any) -> str | None:
        home = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(runs["long"], home, symlinks=True)
        file = home / "checkpoints" / "step-00000008" / "state.json"
        state = json.loads(file.read_text())
        state["config"]["model"] |= {key: train.pop(key) for key in ("emb_dim",) if key in train}
        state["config"]["train"] |= train
        file.write_text(json.dumps(state))
        seal_again(file.parent)
        return read_rows([str(home)])[0].recipe

    plain = recipe()
    older = tmp_path / "older"
    shutil.copytree(runs["long"], older, symlinks=True)
    file = older / "checkpoints" / "step-00000008" / "state.json"
    state = json.loads(file.read_text())
    del state["config"]["model"]["activation"]  # of a version that had GPT-2's only
    file.write_text(json.dumps(state))
    seal_again(older / "checkpoints" / "step-00000008")
    assert plain is not None and read_rows([str(older)])[0].recipe == plain
    without_effect = {"log_interval": 3, "keep_checkpoints": 9, "parallel": "fsdp", "timeout_seconds": 60}
    without_effect |= {
        "checkpoint_interval": 7,
        "recompute_blocks": True,
        "microbatch_size": 4,
        "dataset": "/elsewhere",
    }
    for key, value in {**without_effect, "random_seed": 9, "precision": "fp32"}.items():
        assert recipe(**{key: value}) == plain, key
    for key, value in {"learning_rate": 0.02, "shuffle": True, "adam_beta2": 0.95, "emb_dim": 64}.items():
        assert recipe(**{key: value}) != plain, key


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
    alone = verdict(pair(HELD_OUT), Interval(value=-3, low=None, high=None))
    assert alone.startswith("a and b are not told apart: -3.0000 nats a token, with no interval")


def test_the_page_needs_nothing_else_and_hides_nothing(runs: dict[str, Path], tmp_path: Path) -> None:
    evil = tmp_path / "<script>"
    shutil.copytree(runs["long"], evil, symlinks=True)
    (evil / "evaluations.jsonl").write_text(json.dumps(kept(evil) | {"model": "<script> step-00000008"}) + "\n")
    shown = said(runs["short"], evil, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page and "http" not in page
    assert "short step-00000003 is above &lt;script&gt; step-00000008 by" in page
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


@pytest.mark.parametrize(
    "broken",
    [
        {"groups": {"nats": [1.0, 2.0], "tokens": [1], "text_bytes": [1]}},
        {"groups": {"nats": ["1"], "tokens": [0], "text_bytes": [1]}},
        {"groups": [1]},
        {"nats_per_token": "3.4"},
        {"range": None},
        {"nats_per_token": None, "range": []},
    ],
    ids=str,
)
def test_a_result_of_another_form_is_not_compared(tmp_path: Path, broken: dict[str, Any]) -> None:
    home = losses_on(hellaswag(tmp_path / "a", {1}), **GPJT_RANGE)
    write(home, "loss", **{**kept(home), "evaluation": "loss", **broken})
    (row,) = read_rows([str(home)])
    assert [result["evaluation"] for result in row.results] == ["hellaswag", "loss"]


def test_damaged_lines_are_counted_and_control_characters_are_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = hellaswag(tmp_path / "a\x1b[2J", {1})
    with (home / "evaluations.jsonl").open("ab") as file:
        file.write(b"[1]\n\xff\n" + b"[" * 100_000 + b'\n{"evaluation": "lo')
    found = compare(read_rows([str(home)]))
    assert "\\x1b[2J" in found.rows[0][0].text and "\x1b" not in found.rows[0][0].text
    assert "evaluations.jsonl: skipped 4 of its lines, which are no results" in capsys.readouterr().err


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
