"""`evaluate.py compare` reads what was stored of trained runs."""

import json
import shutil
from pathlib import Path

from tests import launch
from tests.evaluation.comparison.stored import compared, evaluate, hellaswag, kept


def cells(markdown: str) -> dict[str, dict[str, str]]:
    """Return a table in markdown by model and column."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if "|" in line]
    return {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[2:]}


def test_what_trained_longer_is_better_and_a_copy_is_not(runs: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs["long"], copy, symlinks=True)
    shown = compared(runs["short"], runs["long"], "--markdown", "--seed-deviation", "0.01")
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
    alone = compared(runs["short"], runs["long"], "--markdown")
    assert "better" not in alone.partition("held-out loss: ")[2].partition("\n")[0]
    assert f"- held-out loss: {short} is above {long} by " in alone
    assert "no winner: the seed noise is unknown" in alone and "or pass --seed-deviation NATS" in alone
    seeds = compared(runs["long"], runs["other"], "--markdown")
    assert "- Seed noise, held-out loss: long step-00000008, other step-00000008 (2 seeds) from " in seeds
    same = compared(runs["long"], copy, "--markdown")
    assert f"{runs['long']}: {long}, {copy}: {long} are runs of one recipe: their difference is noise" in same


def test_a_checkpoint_and_torn_or_unknown_lines(runs: dict[str, Path], tmp_path: Path) -> None:
    home = tmp_path / "run"
    shutil.copytree(runs["long"], home, symlinks=True)
    with (home / "evaluations.jsonl").open("a") as file:
        file.write(
            '{"evaluation": "poetry", "model": "long step-00000008"}\n[1]\n{"evaluation": "loss", "model": "x"}\n'
        )
        file.write(json.dumps(kept(home) | {"model": "long step-00000004"}) + '\n{"evaluation": "lo')
    assert "long step-00000004" in compared(home, "--markdown")  # the newest
    assert "long step-00000008" in compared(home / "checkpoints" / "step-00000008", "--markdown")


def test_one_process_s_work_is_not_done_by_every_rank(tmp_path: Path) -> None:
    for command in ("compare", "export"):
        done = evaluate(command, tmp_path / "run", tmp_path / "new", environment=launch.RANK_OF_TWO)
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
    assert "no comparable results of" in refused(tmp_path / "empty")
    assert "no comparable results of" in refused(tmp_path / "absent")
