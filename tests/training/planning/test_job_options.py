"""Lines of --dry-run on what the options of the same command line would do."""

from pathlib import Path

import pytest

from common.arguments import options_of, parse
from common.errors import BadInput
from tests.conftest import MakeRun
from training.command import TrainCommand
from training.config.train_config import load_run
from training.planning.estimate_table import dry_run
from training.planning.job_options import describe_options
from training.planning.new_run import new_run

EXAMPLES = {  # each option of training
    "--set": "learning_rate=0.5", "--max-steps": "3", "--hash-every": "2", "--price-per-hour": "14", "--max-hours": "3",
    "--max-usd": "5", "--then": "true", "--device": "cpu", "--resume": "never", "--init-from": "gpt2", "--follow": "",
    "--allow-numerics-drift": "", "--like": "", "--token-files": "", "--world-size": "2",
}  # fmt: skip


def shown(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    command = parse("train.py", TrainCommand, [str(run), "--dry-run", *words])
    dry_run(load_run(run, command.overrides), command, None)
    return capsys.readouterr().out


def test_a_dry_run_shows_each_option_it_takes(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], answers: Path
) -> None:
    run = make_run(min_train_tokens=None, max_epochs=1)
    plain = shown(capsys, run)
    taken = TrainCommand.option_rules.modes["--dry-run"].split()
    assert {*taken} == {*EXAMPLES} <= {option.name for option in options_of(TrainCommand)}
    for name, value in EXAMPLES.items():
        if name == "--like":
            command = parse("train.py", TrainCommand, [f"{run}-new", "--dry-run", name, str(run)])
            new_run(command, lambda _: pytest.fail("no model is named"))
            assert f"{run}-new: not written, like {run}" in capsys.readouterr().out
            continue
        words = [name, *([value] if value else [])]
        if name == "--max-usd":
            words += ["--price-per-hour", "1"]
        if name == "--token-files":
            words += [str(answers), "--set", "objective=answers"]
        lines = shown(capsys, run, *words)
        assert lines != plain, name
        if name not in ("--set", "--token-files", "--world-size"):  # in the arithmetic
            assert f" {name}" in lines


def test_a_dry_run_says_what_an_option_changes(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(capsys, copied, "--max-steps", "5", "--resume", "best", "--then", "curl -u me:password x")
    assert "--max-steps 5: stops after step 5 of 8 with a checkpoint" in said
    assert f"--resume best: resumes from {copied}/checkpoints/step-0000000" in said
    assert "password" not in said
    assert "--max-steps 9: changes nothing, because the run ends after step 8" in shown(
        capsys, copied, "--max-steps", "9"
    )
    assert "options " not in shown(capsys, copied)


def test_a_dry_run_refuses_an_absent_checkpoint(copied: Path) -> None:
    command = parse("train.py", TrainCommand, [str(copied), "--dry-run", "--resume", "step-00000003"])
    with pytest.raises(BadInput, match="no such checkpoint; there are best, latest"):
        describe_options(load_run(copied, ()), command, 8)
