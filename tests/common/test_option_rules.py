"""Option rules: modes, options that need another option, and options that have no effect."""

import pytest

from common.option_rules import OptionRules

RULES = OptionRules(
    work="training",
    uses="--steps --device --limit --price",
    modes={"--plan": "--steps --machine", "--show": "--steps"},
    needs={"--limit": "--price"},
    excludes={"--machine": "--limit", "--limit": "--device"},
    reasons_unused={"training": {"--machine": "others are rented", "--limit": "never shown"}},
    reasons_needed={"--limit": "dollars"},
    reasons_excluded={"--limit": "one or the other"},
)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--steps --device", None),
        ("--plan --machine", None),
        ("--plan --show", "--plan and --show exclude each other; pass one of them"),
        ("--device --show", "--device goes with training, not with --show"),
        ("--machine", "--machine goes with --plan, not with training: others are rented"),
        ("--limit", "--limit needs --price: dollars"),
        ("--limit --plan", "--limit goes with training, not with --plan"),  # no advice to add --price
        ("--limit --price --device", "--limit cannot be combined with --device: one or the other"),
        ("--limit --price --machine", "--machine goes with --plan, not with training: others are rented"),
        ("--limit --price", None),
        (
            "--device --machine --show",
            "--device goes with training, not with --show; --machine goes with --plan, not with --show",
        ),
    ],
)
def test_modes_refuse_unused_options(words: str, problem: str | None) -> None:
    assert RULES.problem({name: ["0"] for name in words.split()}) == problem


@pytest.mark.parametrize(
    ("option_values", "problem"),
    [
        ({"--to": ["wandb"], "--project": ["x"]}, None),
        ({"--to": ["disk"], "--project": ["x"]}, "--project needs --to wandb or --to trackio"),
        ({"--workers": ["2"], "--where": ["ray"]}, "--workers cannot be combined with --where ray"),
        ({"--workers": ["2"], "--where": ["here"]}, None),
        ({"--workers": ["2"]}, None),
    ],
)
def test_rules_may_depend_on_an_option_value(option_values: dict[str, list[str]], problem: str | None) -> None:
    rules = OptionRules(
        needs={"--project": "--to=wandb --to=trackio"}, excludes={"--workers": "--where=inline --where=ray"}
    )
    assert rules.problem(option_values) == problem
