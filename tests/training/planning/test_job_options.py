"""`--dry-run` describes the effect of every option that is given with it."""

from pathlib import Path

import pytest

from common.arguments import options_of, parse
from common.errors import BadInput
from tests.conftest import MakeRun
from training.command import TrainCommand
from training.config.train_config import load_run
from training.planning.dry_run import dry_run
from training.planning.new_run import new_run

EXAMPLES = {  # an example value for each option of train.py
    "--set": "learning_rate=0.5", "--max-steps": "3", "--hash-every": "2", "--price-per-hour": "14", "--max-hours": "3",
    "--max-usd": "5", "--then": "true", "--device": "cpu", "--resume": "never", "--init-from": "gpt2", "--follow": "",
    "--allow-numerics-drift": "", "--like": "", "--token-files": "", "--world-size": "2",
}  # fmt: skip


def dry_run_output(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    command = parse("train.py", TrainCommand, [str(run), "--dry-run", *words])
    dry_run(load_run(run, command.overrides), command, None)
    return capsys.readouterr().out


def test_dry_run_describes_every_option(make_run: MakeRun, capsys: pytest.CaptureFixture[str], answers: Path) -> None:
    run = make_run(min_train_tokens=None, max_epochs=1)
    plain = dry_run_output(capsys, run)
    accepted = TrainCommand.option_rules.modes["--dry-run"].split()
    assert {*accepted} == {*EXAMPLES} <= {option.name for option in options_of(TrainCommand)}
    for name, value in EXAMPLES.items():
        if name == "--like":
            command = parse("train.py", TrainCommand, [f"{run}-new", "--dry-run", name, str(run)])
            new_run(command, lambda _: pytest.fail("the command names no model"))
            assert f"{run}-new: would be written, based on {run}" in capsys.readouterr().out
            continue
        words = [name, *([value] if value else [])]
        if name == "--max-usd":
            words += ["--price-per-hour", "1"]
        if name == "--token-files":
            words += [str(answers), "--set", "objective=answers"]
        lines = dry_run_output(capsys, run, *words)
        assert lines != plain, name
        # These three options change the description of the plan. Every other option is named in a line of its own.
        if name not in ("--set", "--token-files", "--world-size"):
            assert f" {name}" in lines


def test_dry_run_describes_the_effect_of_options(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-steps", "5", "--resume", "step-00000004", "--then", "curl -u me:password x")
    output = dry_run_output(capsys, copied, *options)
    assert "--max-steps 5: stops after step 5 of 8 with a checkpoint" in output
    assert f"--resume step-00000004: resumes from {copied}/checkpoints/step-00000004" in output
    assert "password" not in output
    assert "--max-steps 9: changes nothing, because the run ends after step 8" in dry_run_output(
        capsys, copied, "--max-steps", "9"
    )
    assert "options " not in dry_run_output(capsys, copied)


def test_dry_run_knows_where_the_job_starts(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "metrics.jsonl").write_text(
        '{"event": "start", "step": 0, "elapsed_seconds": 0.0, "price_per_hour": 2.0}\n'
        '{"step": 1, "elapsed_seconds": 1800.0, "time": "2026-01-01T00:00:00Z"}\n'
    )
    limits = ("--max-hours", "3", "--max-usd", "5", "--price-per-hour", "2", "--max-steps", "3")
    output = dry_run_output(capsys, copied, *limits)
    assert f"--max-steps 3: trains nothing: {copied}: the run is complete: 8 steps" in output
    assert "--max-hours 3: stops with a checkpoint before this limit; 0.5 hours used so far" in output
    assert "--max-usd 5: stops with a checkpoint before this limit; $1.00 spent so far" in output
    resumed = dry_run_output(capsys, copied, "--resume", "step-00000004", *limits)
    assert f"--max-steps 3: trains nothing: {copied}: at step 4 of 8; --max-steps allows no more steps" in resumed
    restarted = dry_run_output(capsys, copied, "--resume", "never", *limits)  # a real job would archive the metrics
    assert "--max-steps 3: stops after step 3 of 8 with a checkpoint" in restarted
    assert "0 hours used so far" in restarted and "$0.00 spent so far" in restarted
    output = dry_run_output(capsys, copied, "--max-hours", "0.25")
    assert "--max-hours 0.25: trains nothing, because this limit is used up; 0.5 hours used so far" in output


def test_dry_run_refuses_a_missing_checkpoint(copied: Path) -> None:
    command = parse("train.py", TrainCommand, [str(copied), "--dry-run", "--resume", "step-00000003"])
    with pytest.raises(BadInput, match=r"no such checkpoint; .*existing ones: best, latest"):
        dry_run(load_run(copied, ()), command, None)
