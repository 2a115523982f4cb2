"""Command lines: checked values, one-line usage errors and plain help."""

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, Literal

import attrs
import pytest

from common.arguments import Command, ScriptTexts, arguments_of, option, option_names, options_of, parse
from common.checks import integer
from common.errors import EXIT_USAGE, UsageError
from common.option_rules import OptionRules, given_options, repeated_problem
from common.script import Script
from evaluation.command_line import COMMANDS as EVALUATE_COMMANDS
from experiments.command import COMMANDS as EXPERIMENT_COMMANDS
from reporting.command import COMMANDS as REPORT_COMMANDS
from tokens.command import COMMANDS as PREPARE_COMMANDS
from training.command import FIND_COMMANDS, TrainCommand, key_rows


@attrs.frozen(kw_only=True)
class Example:
    """Describe the command."""

    names: Annotated[tuple[str, ...], option("one or more", name="NAME", required=True)] = attrs.field(kw_only=False)
    count: Annotated[int, option("how many", "N", check=integer(1, 10))] = 3
    span: Annotated[tuple[int, int] | None, option("a pair", "FROM TO", check=integer(1))] = None
    marks: Annotated[tuple[str, ...], option("may be repeated", "KEY=VALUE", name="--set")] = ()
    device: Annotated[Literal["cuda", "cpu"] | None, option("where")] = None
    fast: Annotated[bool, option("hurry")] = False

    def __attrs_post_init__(self) -> None:
        if self.fast and self.device is None:
            raise UsageError("--fast needs --device")


def parsed(*words: str) -> Example:
    example = parse("example.py", Example, words, texts=ScriptTexts(epilog="examples:\n  python example.py\n"))
    assert isinstance(example, Example)
    return example


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str], commands: Any = Example) -> str:
    """Return the line that is printed about a wrong command line."""
    with Script("example.py") as script:
        parse("example.py", commands, words)
    assert script.status == EXIT_USAGE
    output = capsys.readouterr()
    [line] = output.err.splitlines()
    assert output.out == "" and line.isprintable()
    return line


def test_a_command_line_becomes_its_class() -> None:
    assert parsed("a", "--count", "4", "b") == Example(("a", "b"), count=4)
    assert parsed("--span", "2", "5", "a").span == (2, 5)
    assert parsed("a", "--set", "x=1", "--set=y=2") == Example(("a",), marks=("x=1", "y=2"))
    assert parsed("a", "--device=cpu", "--fast", "--fast").fast  # repeating a flag changes nothing
    assert parsed("--", "-a").names == ("-a",)
    assert parsed("a\udcff\x1b").names == ("a\udcff\x1b",)  # bytes of a path that are not UTF-8 are preserved


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "NAME is missing: one or more; see --help"),
        (["a", "--cuont=1"], "--cuont: unknown option; did you mean --count?; see --help"),
        (["a", "--no-fast"], "--no-fast: unknown option; did you mean --fast?"),
        (["a", "--version"], "--version: unknown option; see --help"),
        (["a", "--device", "tpu\x1b[2J"], "--device: got 'tpu\\x1b[2J', wanted cuda or cpu; see --help"),
        (["a", "--device", "gpu"], "--device: got 'gpu', wanted cuda or cpu; see --help"),
        (["a", "--set"], "--set: its value is missing, wanted KEY=VALUE; see --help"),
        (["a", "--set", "-x"], "--set: its value is missing, wanted KEY=VALUE; if -x is the value, write --set=-x;"),
        (["a", "--span", "1"], "--span: got 1 of 2 values, wanted FROM TO; see --help"),
        (["a", "--span", "1", "0"], "--span: got '0', wanted an integer of at least 1"),
        (["a", "--count=11"], "--count: got '11', wanted an integer of at least 1, at most 10; see --help"),
        (["a", "--count", ""], "--count: got '', wanted an integer"),
        (["a", "--fast=maybe"], "--fast: got 'maybe', wanted no value"),
        (["a", "--fast"], "--fast needs --device"),
        (["a", "--count=1", "--count", "2"], "--count is given twice ('1' and '2'); give it once; see --help"),
        (["a", "--device=cpu", "--device=cpu"], "--device is given twice ('cpu' and 'cpu'); give it once"),
        (["a", "--span", "1", "2", "--span", "3", "4"], "--span is given twice ('1 2' and '3 4'); give it once"),
        (
            ["--set=--count", "a", "--count=1", "--count=2", "--count=3"],
            "--count is given 3 times ('1' and '2' and '3');",
        ),
        (["a", "--fast", "--fast=no"], "--fast is given twice ('' and 'no'); give it once"),
        (["a", "--\x1b\udcff"], "--\\x1b\\udcff: unknown option"),
        (["a", "--wandb"], "--wandb: unknown option; use python report.py RUN --to wandb --watch"),
    ],
)
def test_a_usage_error_takes_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(words, capsys).startswith(f"example.py: {message}")


@attrs.frozen(kw_only=True)
class Other:
    """Do something else."""

    name: Annotated[str, option("what", name="NAME")] = attrs.field(kw_only=False)
    out: Annotated[str, option("where to", "DIR")] = "x"


def test_the_first_word_selects_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"example": Example, "other": Other}
    assert parse("example.py", commands, ["other", "x"]) == Other("x")
    for words, message in (
        ([], "COMMAND is missing; known: example, other; see --help"),
        (["othre"], "'othre': unknown command; did you mean 'other'?; known: example, other; see --help"),
        (["zzz"], "'zzz': unknown command; known: example, other; see --help"),
        (["zzz", "--help"], "'zzz': unknown command; known: example, other; see --help"),
        (["--out", "x"], "COMMAND is missing before --out, such as example.py other ... --out; see --help"),
        (["other"], "other: NAME is missing: what; see --help"),
        (["other", "x", "y"], "other: unexpected argument 'y', wanted NAME and options; see --help"),
        (
            ["other", "x", "--count=3"],
            "other: --count: unknown option; it is an option of example.py example; see --help",
        ),
    ):
        assert refused(words, capsys, commands) == f"example.py: {message}"


def test_other_words_select_the_unnamed_command(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"": Example, "other": Other}
    assert parse("example.py", commands, ["othr"]) == Example(("othr",))
    line = refused(["a", "--out=x"], capsys, commands)
    assert line == "example.py: --out: unknown option; it is an option of example.py other; see --help"
    assert refused(["other", "a", "--count=3"], capsys, commands).endswith("it is an option of example.py; see --help")


COMMANDS: dict[str, Mapping[str, Command]] = {
    "find_batch_size.py": FIND_COMMANDS,
    "prepare_data.py": PREPARE_COMMANDS,
    "evaluate.py": EVALUATE_COMMANDS,
    "report.py": REPORT_COMMANDS,
    "experiment.py": EXPERIMENT_COMMANDS,
}
# For each script and command, the class that defines the command's options
SCRIPTS: dict[str, dict[str, Any]] = {"train.py": {"": TrainCommand}} | {
    script: {name: command.options for name, command in commands.items()} for script, commands in COMMANDS.items()
}
PAIRS = [(script, command) for script, commands in SCRIPTS.items() for command in commands]
OF_LIBRARIES = (
    "Unknown option",
    "Parameter",
    "requires",
    "Invalid value",
    "Unused",
    "convert",
    "Did you mean",
    "Command",
)


@pytest.mark.parametrize("script", list(COMMANDS))
def test_every_command_names_a_function(script: str) -> None:
    for command in COMMANDS[script].values():
        assert callable(getattr(import_module(command.module), command.function)), command


def parsed_by(script: str, words: Sequence[str]) -> Any:
    commands = SCRIPTS[script]
    return parse(script, commands[""] if [*commands] == [""] else commands, words)


def usage_error(script: str, words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line that a script prints about a wrong command line, after checking that no library wrote it."""
    with Script(script) as end:
        parsed_by(script, words)
    output = capsys.readouterr()
    [line] = output.err.splitlines()
    assert (end.status, output.out) == (EXIT_USAGE, "") and line.startswith(f"{script}: ")
    assert line.endswith("; see --help") and not any(text in line for text in OF_LIBRARIES), line
    return line


@pytest.mark.parametrize(("script", "command"), PAIRS)
def test_usage_errors_of_all_commands_are_ours(script: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [argument for argument in arguments_of(SCRIPTS[script][command]) if argument.show]
    positional = [argument for argument in arguments if argument.name.strip("-.").isupper()]
    options = [argument for argument in arguments if argument not in positional]
    # All required options are given, because a missing one could be reported before the wrong option.
    required = [
        f"{argument.name}={'999' if 'int' in str(argument.hint) else 'x'}" for argument in options if argument.required
    ]
    words_before = [*filter(None, [command]), *(f"w{number}" for number, _ in enumerate(positional))]

    def message(*words: str) -> str:
        return usage_error(script, [*words_before, *words], capsys)

    assert "--xyzzy: unknown option; see --help" in message("--xyzzy")
    assert "-Z: unknown option" in message("-Z")
    line = usage_error(script, [*filter(None, [command])], capsys)
    assert re.search(r"[A-Z/]+(\.\.\.)? is missing: \S", line), line
    if positional and not any(argument.name.endswith("...") for argument in positional):
        assert f"unexpected argument 'extra', wanted {positional[0].name.strip('-')}" in message("extra")
    for argument in options:
        name, choices = argument.name, argument.get_choices(force=True)
        other_required = [word for word in required if word.partition("=")[0] != name]
        if argument.hint is bool:
            assert f"{name}: got 'perhaps', wanted no value" in message(f"{name}=perhaps")
            continue
        assert f"{name}: " in message(name) and " wanted " in message(name)
        if argument.token_count()[0] == 1:
            assert f"; if --xyzzy is the value, write {name}=--xyzzy" in message(name, "--xyzzy")
        if choices:
            assert f"{name}: got 'xyzzy', wanted {choices[0]}" in message(name, "xyzzy", *other_required)
        elif re.search("int|float", str(argument.hint)) and argument.token_count()[0] == 1:
            assert f"{name}: got '-x', wanted " in message(f"{name}=-x", *other_required)
    if options:
        longest_name = max((argument.name for argument in options), key=len)
        assert f"unknown option; did you mean {longest_name}?" in message(longest_name + "q")
    foreign_name = next(
        (
            name
            for sibling, kind in SCRIPTS[script].items()
            if sibling != command
            for name in sorted(option_names(kind))
            if name not in option_names(SCRIPTS[script][command])
        ),
        None,
    )
    if foreign_name is not None:
        assert f"{foreign_name}: unknown option; " in message(f"{foreign_name}=1")


@pytest.mark.parametrize(("script", "command"), PAIRS)
def test_no_command_accepts_a_value_twice(script: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(SCRIPTS[script][command])
    single = [argument for argument in options if argument.hint is not bool and not argument.token_count()[1]]
    for argument in single:
        values = ["1 2", "3 4"] if argument.token_count()[0] == 2 else ["1", "3"]
        words = [word for example in values for word in (argument.name, *example.split())]
        repetition = f"{argument.name} is given twice ({values[0]!r} and {values[1]!r}); give it once"
        assert repeated_problem(options, given_options(options, words)) == repetition
    path_names = [argument.name for argument in single if "str" in str(argument.hint) or "Path" in str(argument.hint)]
    for name in path_names[:1]:  # one option is enough to show that the command applies the rule
        positional = [
            argument for argument in arguments_of(SCRIPTS[script][command]) if argument.name.strip("-.").isupper()
        ]
        required_words = [
            f"{argument.name}={'999' if 'int' in str(argument.hint) else 'x'}"
            for argument in options
            if argument.required
        ]
        words = [*filter(None, [command]), *(f"w{number}" for number, _ in enumerate(positional)), *required_words]
        words = [word for word in words if not word.startswith(f"{name}=")]
        line = usage_error(script, [*words, name, "a.json", f"{name}=b.json"], capsys)
        assert f"{name} is given twice ('a.json' and 'b.json'); give it once" in line


RULES = [(script, command) for script, command in PAIRS if hasattr(SCRIPTS[script][command], "option_rules")]


@pytest.mark.parametrize(("script", "command"), RULES)
def test_option_rules_cover_all_options(script: str, command: str) -> None:
    """A new option must be added to the table of modes, and an option that no longer exists must be removed."""
    rules, names = (
        SCRIPTS[script][command].option_rules,
        {argument.name for argument in options_of(SCRIPTS[script][command])},
    )
    mode_options = {name for uses in (rules.uses, *rules.modes.values()) for name in uses.split()} | {*rules.modes}
    conditions = " ".join([*rules.needs.values(), *rules.excludes.values()]).split()
    table_options = {
        *mode_options,
        *rules.needs,
        *rules.excludes,
        *rules.reasons_needed,
        *rules.reasons_excluded,
        *(argument.partition("=")[0] for argument in conditions),
    }
    assert table_options <= names and (not rules.modes or mode_options == names)
    assert {*rules.reasons_unused} <= {rules.work, *rules.modes}
    assert {*rules.reasons_needed} <= {*rules.needs} and {*rules.reasons_excluded} <= {*rules.excludes}
    for mode, reasons in rules.reasons_unused.items():  # there are reasons only for options that the mode does not use
        assert {*reasons} <= names - {*(rules.uses if mode == rules.work else rules.modes[mode]).split()}
    choices = {argument.name: argument.get_choices(force=True) for argument in options_of(SCRIPTS[script][command])}
    for condition in conditions:
        name, equals, example = condition.partition("=")
        assert not equals or example in choices[name], condition


# The options that a user can combine with each mode of train.py, listed here a second time by hand.
TRAIN_OPTIONS_BY_MODE = {
    "training": "--like --set --token-files --follow --resume --init-from --allow-numerics-drift --device --max-steps "
    "--hash-every --price-per-hour --max-hours --max-usd --then",
    "--dry-run": "--like --set --token-files --follow --resume --init-from --allow-numerics-drift --device --max-steps "
    "--hash-every --price-per-hour --max-hours --max-usd --then --world-size",
    "--keys": "",
    "--plan": "--like --set --token-files --resume --init-from --price-per-hour --machines --machine --nodes "
    "--node-link --preemptions",
    "--preflight": "--like --set --token-files --resume --init-from --device",
    "--find-max-microbatch": "--like --set --token-files --init-from --device --write",
    "--replay": "--set --token-files --follow --init-from --device",
    "--look": "--set --token-files --init-from --device --rank --html",
}


@pytest.mark.parametrize("mode", TRAIN_OPTIONS_BY_MODE)
def test_each_mode_of_train_accepts_its_options(mode: str) -> None:
    rules, names = TrainCommand.option_rules, {argument.name for argument in options_of(TrainCommand)}
    modes = {*TRAIN_OPTIONS_BY_MODE} - {"training"}
    assert modes == {*rules.modes}
    words_before = {} if mode == "training" else {mode: ["1"]}
    for name in sorted(names - modes):
        priced = {"--price-per-hour": ["1"]} if name == "--max-usd" and mode in ("training", "--dry-run") else {}
        line = rules.problem(words_before | priced | {name: ["1"]})
        if name in TRAIN_OPTIONS_BY_MODE[mode].split():
            assert line is None, line
        else:
            assert line is not None and line.startswith(f"{name} goes with ") and f", not with {mode}" in line
    for second_mode in modes - {mode} if words_before else ():
        assert "exclude each other" in str(rules.problem(words_before | {second_mode: ["1"]}))


@pytest.mark.parametrize(("script", "command"), RULES)
def test_an_option_without_effect_is_refused(script: str, command: str) -> None:
    """If a mode is combined with an option that it does not use, a single line names both."""
    rules = SCRIPTS[script][command].option_rules
    for mode, uses in rules.modes.items():
        for name in {argument.name for argument in options_of(SCRIPTS[script][command])} - {mode, *uses.split()}:
            line = rules.problem({name: ["1"], mode: ["1"]})
            assert line is not None and mode in line and name in line
            assert ("exclude each other" if name in rules.modes else f"{name} goes with ") in line


def test_a_sweep_limits_only_its_own_machine() -> None:
    def problem(*names: str) -> str | None:
        rules: OptionRules = SCRIPTS["experiment.py"]["sweep"].option_rules
        return rules.problem({name: ["1"] for name in names})

    assert problem("--max-hours") is None and problem("--max-usd", "--price-per-hour") is None
    assert problem("--max-usd") == "--max-usd needs --price-per-hour: the price of the machine"
    for name in ("--max-hours", "--max-usd"):
        refused_with = f"{name} goes with training or --dry-run, not with"
        reason = "it limits training on this machine, not on others"
        assert problem("--print-commands", name) == f"{refused_with} --print-commands: {reason}"
        assert problem("--collect", name) == f"{refused_with} --collect"


def test_an_unknown_command_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` after an unknown command is an error, too: a call of a removed command must never end with status 0."""
    commands = {f"command-{number}": Example for number in range(20)}
    for words, problem in (
        (["bogus"], "'bogus': unknown command"),
        (["bogus", "--help"], "'bogus': unknown command"),
        (["bogus", "-h"], "'bogus': unknown command"),
        (["--bogus", "--help"], "COMMAND is missing before --bogus"),
    ):
        line = refused(words, capsys, commands)
        assert line == f"example.py: {problem}; known: {', '.join(commands)}; see --help"


def test_help_is_plain_text_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--help")
    output = capsys.readouterr().out
    assert ended.value.code == 0
    assert "  --count N               how many (default: 3)\n" in output
    assert "  --span FROM TO          a pair\n" in output and "--device cuda|cpu" in output
    assert output.startswith("Usage: example.py") and output.endswith("\nexamples:\n  python example.py\n")
    assert "Describe the command." in output
    assert all(len(line) <= 80 and line.isprintable() for line in output.splitlines())


def test_help_says_how_to_list_the_options_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("evaluate.py", SCRIPTS["evaluate.py"], ["--help"])
    output = capsys.readouterr().out
    assert "\nCommands (evaluate.py COMMAND --help lists the options of a command):\n" in output
    assert all(len(line) <= 80 for line in output.splitlines())


def test_a_key_after_set_needs_an_equals_sign() -> None:
    with pytest.raises(UsageError) as raised:
        parse("train.py", TrainCommand, ["runs/a", "--set", "learning_rate", "0.01"], key_rows=key_rows)
    expected = "train.py: unexpected argument '0.01'; to set a key, write --set learning_rate=0.01; see --help"
    assert expected.endswith(str(raised.value))
