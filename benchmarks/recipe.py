"""Parts of the modern recipe, one after the other, at a small size on real text: what each gains, and what it costs.

python benchmarks/recipe.py [--tokens DIR] [--layers 2] [--width 128] [--steps 400] [--runs DIR] [--together LEVER ...]

The first recipe is GPT-2 with AdamW; each lever is tried on the best one so far, and stays if it lowers the validation
loss at equal CPU seconds by more than seed noise. Text: this Python's library sources as bytes, unless a directory of
token files is given. Learning rates are tuned by steps of sqrt(2), on two seeds. Then each recipe is trained
from three: for so many steps, for as many as take the CPU seconds of the first recipe, and for a half, a quarter,
... of them until it ends above the first recipe's loss. CPU seconds: medians of steps in turn in one process.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import attrs
import command
import torch
from recipe_ladder import LEVERS, Ladder, Rung, difference
from recipe_runs import Experiment, Recipe, Trainer

from common.errors import BadInput
from training.hardware.environment import cpu_name, git_commit

DEFAULT = Experiment()
THIRD = 1 / 3  # of the first recipe's tokens, and half of its CPU seconds: the aim for all levers together


def main(
    experiment: Experiment = DEFAULT,
    *,
    steps: int = 400,
    jobs: int = 2,
    runs: Path | None = None,
    together: tuple[str, ...] = (),
) -> None:
    """Train everything and print the table.

    Args:
        jobs: runs at a time, on a core each.
        runs: keep run directories there, and train none again that is finished; default: a temporary directory.
        together: names of levers: no ladder, but the first recipe beside one with all of these, on a third of the
            tokens and on half of the CPU seconds; its rates are tuned on a third of the tokens.
    """
    known = {lever.name.removeprefix("+ "): lever for lever in LEVERS}
    if unknown := [name for name in together if name not in known]:
        raise BadInput(f"--together: unknown lever {unknown[0]!r}; known: {', '.join(map(repr, known))}")
    with ExitStack() as stack:
        folder = (runs or Path(stack.enter_context(TemporaryDirectory()))).resolve()
        tokens = folder / "tokens" if experiment.tokens is None else experiment.tokens.resolve()
        if experiment.tokens is None:
            command.call("prepare_data.py", "stdlib", "--output", tokens, *command.BYTES)
        experiment = attrs.evolve(experiment, tokens=tokens)
        ladder = Ladder(Trainer(folder, experiment, jobs), steps, experiment.seeds)
        print(f"{cpu_name() or 'CPU'}, torch {torch.__version__}, commit {git_commit()}")
        print(f"command: {' '.join(sys.argv)}")
        print(f"{steps} steps of {experiment.batch * experiment.context:,} tokens\n", flush=True)
        if together:
            first, recipe, seconds = ladder.jump([known[name] for name in together], THIRD)
        else:
            rungs = ladder.climb()
            _print_table(ladder, rungs)
            best = next(rung for rung in reversed(rungs) if rung.stays)
            first, recipe, seconds = rungs[0], best.recipe, best.step_seconds
        _print_goal(ladder, first, recipe, seconds)
        print(f"model.json of the best: {recipe.model}")
        print(f"train.json of the best: {recipe.train}")


def _print_table(ladder: Ladder, rungs: list[Rung]) -> None:
    """Print a row for each lever."""
    plain = rungs[0]
    seeds = [f"seed {seed}" for seed in ladder.seeds]
    columns = [
        "recipe",
        "learning rates",
        *seeds,
        "mean",
        "gain [95 %]",
        "at equal CPU s",
        "CPU s a step",
        "tokens",
        "CPU s",
        "",
    ]
    rows = []
    for rung in rungs:
        share = ladder.share_to_reach(rung, fmean(plain.losses))
        rows.append(
            [
                rung.name,
                rung.recipe.rates,
                *(f"{loss:.4f}" for loss in rung.losses),
                f"{fmean(rung.losses):.4f}",
                *("" if gain is None else gain.text(4, "+") for gain in (rung.gain, rung.gain_at_equal_time)),
                f"{rung.step_seconds:.2f}",
                *("> 1" if share is None else f"{share * cost:.2f}" for cost in (1.0, rung.step_seconds)),
                "stays" if rung.stays else "left off",
            ]
        )
    print(command.markdown_table(columns, rows))
    print(
        "\nCPU s a step, and tokens and CPU seconds until the first recipe's final loss: shares of the first recipe's"
    )


def _print_goal(ladder: Ladder, first: Rung, best: Recipe, step_seconds: float) -> None:
    """Print how the best recipe ends on a third of the first one's tokens, and on half of its CPU seconds."""
    print(f"the best one takes {step_seconds:.2f} of the first recipe's CPU seconds a step")
    print(f"first recipe: {_losses(first.losses)}; {first.recipe.rates}")
    for text, share in (("a third of the tokens", THIRD), ("half the CPU seconds", 1 / 2 / step_seconds)):
        losses = ladder.losses(best, share)
        apart = difference(losses, first.losses)
        print(f"best on {text}: {_losses(losses)}; {best.rates}; less the first recipe's loss {apart.text(4, '+')}")


def _losses(losses: list[float]) -> str:
    return f"{', '.join(f'{loss:.4f}' for loss in losses)}, mean {fmean(losses):.4f}"


if __name__ == "__main__":
    command.run(main)
