"""Comparisons show the data that models share, compare only results on the same data, and show their intervals."""

import json
import shlex
import shutil
import string
from pathlib import Path

import pytest

from common.errors import BadInput
from common.text import small_number
from evaluation.command_line import CompareCommand
from evaluation.comparison.compare import Cell, Comparison, as_fragment, as_markdown, compare, run
from evaluation.core.core_scores import PUBLISHED
from evaluation.loss.loss_measures import GPJT_RANGE
from tests import launch
from tests.conftest import one_line, only_line
from tests.evaluation.comparison.stored import (
    compared,
    core,
    evaluate,
    judged,
    losses_on,
    newest_result,
    output_of,
    rows_of,
    without_hash,
)
from tests.evaluation.core.written_bundle import WORDS, write_bundle
from tokens.tokenizer.loading import load_tokenizer, record_of
from training.telemetry.metrics_log import EVALUATIONS


def test_most_common_data_is_shown_before_newest(tmp_path: Path) -> None:
    a, b = core(tmp_path / "a", 1), core(tmp_path / "b", 1)
    core(b, 2, sha256="other")
    comparison = compare(rows_of(a, b))
    assert comparison.statements[0].startswith("CORE: a and b do not differ significantly: 0.0000")


def test_different_judge_sessions_are_not_compared(tmp_path: Path) -> None:
    clear = [{"a": "a", "b": "b", "value": -4.0, "low": -7.0, "high": -1.0}]
    a, b = judged(tmp_path / "a", [20, 17, 23], clear), judged(tmp_path / "b", [24, 21, 27], clear)
    c = judged(tmp_path / "c", [90, 85, 95], [{"a": "c", "b": "d", "value": 50, "low": 40, "high": 60}])
    comparison = compare(rows_of(c, b, a))
    statement = "b is above a by 4.00 [1.00, 7.00] points; no winner: the seed noise is unknown"
    assert comparison.statements == [f"judge's score: {statement}"]
    shown = {row[0].text: row[-1].text for row in comparison.rows}
    assert shown["b"] == "24.00 [21.00, 27.00]"
    assert shown["c"] == "90.00 [85.00, 95.00] [a]"
    assert shown["OpenAI GPT-2 medium, published"] == "38.53 [1]"
    assert any(note.startswith("[a] not comparable with the others: judge: 110 questions") for note in comparison.notes)


def test_complete_session_is_shown_before_incomplete(tmp_path: Path) -> None:
    complete = [{"a": "a", "b": "b", "value": -4.0, "low": -7.0, "high": -1.0}]
    incomplete = [{"a": "a", "b": "b", "value": 9.0, "low": 8.0, "high": 10.0}]
    homes = [judged(tmp_path / name, [20, 17, 23], complete, left_out=0) for name in "ab"]
    for home in homes:
        judged(home, [50, 47, 53], incomplete, left_out=144, time="2999-01-01T00:00:00+00:00")
    assert "by 4.00" in compare(rows_of(*homes)).statements[0]
    alone = [judged(tmp_path / name, [50, 47, 53], incomplete, left_out=144) for name in "cd"]
    notes = compare(rows_of(*alone)).notes
    assert any("without 144 prompts that were left out for all models" in note for note in notes)


def test_columns_have_the_order_of_commands(tmp_path: Path) -> None:
    home = judged(tmp_path / "a", [20, 17, 23], [])
    losses_on(core(home, 1))
    shown = ["held-out loss", "bits/byte", "CORE", "gold bits/byte", "judge's score"]
    assert compare(rows_of(home)).columns == ["model", *shown]


def test_published_losses_need_the_same_tokens(tmp_path: Path) -> None:
    same = losses_on(tmp_path / "a", **GPJT_RANGE)
    different = core(losses_on(tmp_path / "b", **GPJT_RANGE | {"start": 0}), 1)
    comparisons = [compare(rows_of(home)) for home in (same, different)]
    published = [{row[0].text: row[1].text for row in comparison.rows[1:]} for comparison in comparisons]
    assert published[0]["OpenAI GPT-2 medium, published"] == "3.231 [1]"
    assert published[1] == {f"OpenAI {name}, published": "" for name in PUBLISHED}  # the published models of CORE
    assert not any("left out" in note for note in comparisons[0].notes)
    assert any(note.startswith("Published losses of OpenAI's GPT-2 are left out") for note in comparisons[1].notes)


def test_sources_of_published_values_are_numbered(tmp_path: Path) -> None:
    home = judged(core(losses_on(tmp_path / "a", **GPJT_RANGE), 1), [20, 17, 23], [])
    comparison = compare(rows_of(home))
    rows = {row[0].text: dict(zip(comparison.columns, row, strict=True)) for row in comparison.rows}
    small = rows["OpenAI GPT-2 small, published"]
    assert small["held-out loss"].text == "3.500 [1]"
    assert small["CORE"].text == "0.1139 [2]"
    assert small["judge's score"].text == "22.98 [3]"
    assert small["held-out loss"].bounds is None
    assert sum(note.startswith(("[1] ", "[2] ", "[3] ")) for note in comparison.notes) == 3
    assert any("Published values have no interval" in note for note in comparison.notes)
    assert not any("published" in line for line in comparison.statements)


def test_table_fits_the_terminal(runs: dict[str, Path], tmp_path: Path) -> None:
    far = tmp_path / ("a-long-name-" * 6)
    shutil.copytree(runs["long"], far, symlinks=True)
    shown = compared(*runs.values(), far, environment={"COLUMNS": "80"})
    assert max(map(len, shown.splitlines())) <= 80 + len(str(far))  # a path is not wrapped
    tables, _, _ = shown.partition("held-out loss: ")
    assert max(map(len, tables.splitlines())) <= 80
    rows = [line for line in tables.splitlines() if line.startswith("held-out loss")]
    assert len(rows) > 1
    for home in runs.values():
        assert sum(f"{newest_result(home)['nats_per_token']:.4f} ±" in row for row in rows) >= 1


def test_intervals_of_a_column_share_a_scale() -> None:
    rows = [
        [Cell(text="a"), Cell(text="1", value=1.0, bounds=(0.0, 2.0)), Cell(text="7")],
        [Cell(text="b"), Cell(text="3", value=3.0, bounds=(2.0, 4.0)), Cell()],
    ]
    page = as_fragment(Comparison(columns=["model", "x", "y"], rows=rows, statements=["a < b"], notes=[]))
    assert '<td>1<svg width="96" height="12" role="img" aria-label="95% interval"><line x1="4.0" x2="48.0"' in page
    assert '<line x1="48.0" x2="92.0" y1="6.0" y2="6.0"/><circle cx="70.0" cy="6.0" r="3"/></svg></td><td></td>' in page
    assert "<td>range of the bars (95% intervals)</td><td>0 to 4</td><td></td>" in page
    assert "<li>a &lt; b</li>" in page and page.count("<ul") == 1


def test_markdown_characters_are_escaped() -> None:
    comparison = Comparison(columns=["model"], rows=[[Cell(text="a|b <i>")]], statements=[], notes=["x|y"])
    assert "a\\|b \\<i>" in as_markdown(comparison) and "- x\\|y" in as_markdown(comparison)


def cells(markdown: str) -> dict[str, dict[str, str]]:
    """Return the cells of a Markdown table by model and column."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if "|" in line]
    return {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[2:]}


def test_longer_training_is_better_but_a_copy_is_not(runs: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs["long"], copy, symlinks=True)
    shown = compared(runs["short"], runs["long"], "--markdown", "--seed-deviation", "0.01")
    short, long = "short step-00000003", "long step-00000008"
    assert f"- held-out loss: {long} is better than {short} by " in shown
    table = cells(shown)
    state = json.loads((runs["long"] / "checkpoints" / "best" / "state.json").read_text())
    result = newest_result(runs["long"])
    assert table[long] == {
        "model": long,
        "tokens": "2,048",
        "hours": small_number(state["elapsed_seconds"] / 3600),  # must not be "0.00"
        "dollars": small_number(state["elapsed_seconds"]),
        "validation loss": f"{state['validation_loss']:.4f}",
        "held-out loss": f"{result['nats_per_token']:.4f} ± {result['nats_per_token_error']:.4f}",
        "bits/byte": f"{result['bits_per_byte']:.4f} ± {result['bits_per_byte_error']:.4f}",
    }
    assert "published" not in "".join(table)
    assert "Published losses of OpenAI's GPT-2 are left out: they are nats per GPT-2 token of FineWeb" in shown
    assert "- Seed noise, held-out loss: standard deviation 0.01, as stated by --seed-deviation" in shown
    alone = compared(runs["short"], runs["long"], "--markdown")
    assert "better" not in alone.partition("held-out loss: ")[2].partition("\n")[0]
    assert f"- held-out loss: {short} is above {long} by " in alone
    assert "no winner: the seed noise is unknown" in alone and "pass --seed-deviation NATS" in alone
    seeds = compared(runs["long"], runs["other"], "--markdown")
    assert "- Seed noise, held-out loss: long step-00000008, other step-00000008 (2 seeds) from " in seeds
    same = compared(runs["long"], copy, "--markdown")
    assert f"{runs['long']}: {long}, {copy}: {long} are runs of the same recipe: their difference is noise" in same


def test_unknown_and_incomplete_lines_are_ignored(runs: dict[str, Path], tmp_path: Path) -> None:
    home = tmp_path / "run"
    shutil.copytree(runs["long"], home, symlinks=True)
    with (home / "evaluations.jsonl").open("a") as file:
        file.write('{"evaluation": "poetry", "model": "long step-00000008"}\n')
        file.write('[1]\n{"evaluation": "loss", "model": "x"}\n')
        line = json.dumps(without_hash(newest_result(home)) | {"model": "long step-00000004"})
        file.write(line + '\n{"evaluation": "lo')
    assert "long step-00000004" in compared(home, "--markdown")  # the newest result
    assert "long step-00000008" in compared(home / "checkpoints" / "step-00000008", "--markdown")


def test_single_process_commands_refuse_torchrun(tmp_path: Path) -> None:
    for command in ("compare", "export"):
        message = f"evaluate.py: {command}: got 2 processes of torchrun, wanted one; run python evaluate.py {command}"
        assert one_line(evaluate(command, tmp_path, tmp_path / "new", environment=launch.RANK_OF_TWO)) == message


def test_models_without_common_results_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    def refused(*arguments: str | Path) -> str:
        return only_line(evaluate("compare", *arguments))

    a = core(tmp_path / "a", 1)
    broken = tmp_path / "broken"
    shutil.copytree(runs["long"], broken)
    (broken / "checkpoints" / "step-00000008" / "state.json").write_text("")
    assert "state.json: not JSON" in refused(broken)
    assert "long step-00000008, a: no overlap: these models have no results on the same text" in refused(
        runs["long"], a
    )
    (tmp_path / "empty").mkdir()
    assert "no comparable results of" in refused(tmp_path / "empty")
    assert "absent: no such directory; wanted a model directory" in refused(tmp_path / "absent")


def advised(*models: str | Path) -> list[str]:
    """Return the command, without the interpreter, that `compare` recommends for models without a common text."""
    command = one_line(evaluate("compare", *models)).rpartition(": python ")[2]
    script, *words = shlex.split(command)
    assert script == "evaluate.py"
    return words


def test_the_advised_command_makes_two_models_comparable(runs: dict[str, Path], tmp_path: Path) -> None:
    copies = [tmp_path / name for name in ("one", "two")]
    for copy, count in zip(copies, (50, 60), strict=True):
        shutil.copytree(runs["long"], copy, symlinks=True)
        losses_on(copy, sha256=str(count))
        (copy / "evaluations.jsonl").write_text(json.dumps(newest_result(copy)) + "\n")
    output_of(*advised(*copies), "--device", "cpu", "--from", "1000", "--count", "2000")
    assert "held-out loss" in compared(*copies)


def test_the_advised_command_works_for_different_tokenizers(runs: dict[str, Path], tmp_path: Path) -> None:
    copies = [tmp_path / name for name in ("bytes", "characters")]
    for copy in copies:
        shutil.copytree(runs["long"], copy, symlinks=True)
        losses_on(copy, sha256=copy.name)
        (copy / "evaluations.jsonl").write_text(json.dumps(newest_result(copy)) + "\n")
    letters = "".join(sorted({*string.printable, *"".join(WORDS)}))
    resolved = json.loads((copies[1] / "resolved.json").read_text())
    resolved["tokenizer"] = record_of(load_tokenizer(f"chars:{letters}"), ranks=False).as_json()
    (copies[1] / "resolved.json").write_text(json.dumps(resolved))
    words = advised(*copies)
    assert words[0] == "core"
    output_of(*words, "--device", "cpu", "--bundle", write_bundle(tmp_path / "bundle"), "--count", "8")
    assert "CORE, part" in compared(*copies)


def test_a_model_without_results_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home, absent = losses_on(tmp_path / "measured"), tmp_path / "absent"
    absent.mkdir()
    with pytest.raises(BadInput) as raised:
        run(CompareCommand((str(absent), str(home))))
    [problem] = raised.value.problems
    assert f"no comparable results of {absent}; measure it first: python evaluate.py loss {absent}" in str(problem)
    assert "held-out loss" in capsys.readouterr().out


def test_results_with_other_tokenizers_have_separate_columns(tmp_path: Path) -> None:
    def core_by(name: str, is_other: bool) -> Path:
        home = core(tmp_path / name, 50, 1.0)
        [line] = (home / EVALUATIONS).read_text().splitlines()
        record = {"given_tokenizer": {"name": "gpt2", "identity": "x", "is_other": is_other}}
        (home / EVALUATIONS).write_text(json.dumps(json.loads(line) | record) + "\n")
        return home

    plain, with_tokenizer = core(tmp_path / "own", 90, 1.0), core_by("other", True)
    with pytest.raises(BadInput, match="no overlap"):
        compare(rows_of(plain, with_tokenizer))
    alone = compare(rows_of(with_tokenizer))
    assert "CORE, tokenizer gpt2" in alone.columns and len(alone.rows) == 1  # no published models are shown
    assert any("read with tokenizer gpt2, which is not the model's own" in note for note in alone.notes)
    assert any("other: measured with --tokenizer gpt2, which is not the model's own: core" in n for n in alone.notes)

    unknown = compare(rows_of(plain, core_by("unknown", False)))
    assert unknown.columns == ["model", "CORE", "gold bits/byte"]
    assert any("unknown: measured with --tokenizer gpt2; the model names no tokenizer" in n for n in unknown.notes)
