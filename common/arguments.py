"""Parse command lines into typed classes with cyclopts: option values are checked, and usage errors are one line."""

import functools
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import attrs
from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    RepeatArgumentError,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.argument import Argument
from cyclopts.help import HelpPanel, PlainFormatter

from common.checks import KeyRows, ValueCheck
from common.errors import EXIT_DONE, UsageError
from common.option_rules import OptionRules, given_options, repeated_problem, without_false_flags
from common.text import closest, either, printable, quoted

WIDTH = 80  # width of the help, in columns
NAME_WIDTH = 22  # width of the left column of the help, which holds the names
HELP_WORDS = ("--help", "-h")


@attrs.frozen(kw_only=True)
class ScriptTexts:
    """Texts that a script's help shows before and after its options."""

    description: str = ""  # only if the script has commands; each command is described by a docstring
    epilog: str = ""


NO_TEXTS = ScriptTexts()


@attrs.frozen
class Command:
    """A command of a script: its options, and the function that carries it out.

    The module is imported only when the command runs, so that --help is quick. The function takes the options and
    returns the exit status, or None for success.
    """

    options: type  # a frozen class of options; its docstring is the command's help
    module: str
    function: str = "run"

    def run(self, options: Any) -> int:
        status = getattr(import_module(self.module), self.function)(options)
        return EXIT_DONE if status is None else int(status)


def option(
    help_text: str,
    metavar: str = "",
    *,
    name: str | tuple[str, ...] | None = None,
    required: bool | None = None,
    check: ValueCheck | Callable[[str], Any] | None = None,
) -> Parameter:
    """Describe an option, or a positional argument, for the annotation of its field.

    Arguments:
        help_text: what the option does
        metavar: the word that stands for its value in the help
        name: the option's name or names, if they are not derived from the field's name. The help shows the first one.
            A positional argument has its metavar as its name.
        required: whether it must be given; by default, this is true if the field has no default
        check: a check of the option's value, or a function that converts the option's text to its value. The function
            may raise ValueError.
    """

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        parse_value = check.parse if isinstance(check, ValueCheck) else check
        assert parse_value is not None
        values = tuple(parse_value(token.value) for token in tokens)
        return values if len(values) > 1 else values[0]

    converter = None if check is None else convert
    # cyclopts has no metavars, so the first line of the help text is the metavar. PlainHelp removes it from the text.
    return Parameter(name=name, help=f"{metavar}\n{help_text}", converter=converter, required=required)


def read_command(
    script: str,
    commands: Mapping[str, Command],
    words: Sequence[str],
    *,
    texts: ScriptTexts = NO_TEXTS,
    key_rows: Callable[[], KeyRows] = dict,
) -> tuple[Command, Any]:
    """Return the command that a command line selects, and its options.

    The arguments and errors are the same as for `parse`. A script without commands has a single command named "".
    """
    classes = {name: command.options for name, command in commands.items()}
    options = parse(script, classes[""] if [*classes] == [""] else classes, words, texts=texts, key_rows=key_rows)
    return next(command for command in commands.values() if command.options is type(options)), options


def parse(
    script: str,
    commands: type | Mapping[str, Any],
    words: Sequence[str],
    *,
    texts: ScriptTexts = NO_TEXTS,
    key_rows: Callable[[], KeyRows] = dict,
) -> Any:
    """Parse a command line into an instance of the class that describes its options.

    `commands` is this class or, for a script with commands, a mapping from the names of the commands to their classes.
    The first word of the command line then selects the command. If that word names no command, or if there are no
    words, the command named "" is used, provided that the script has it. The help shows the class's docstring. The
    class may have `help_groups`, which maps titles to names of options, and `option_rules`, which state which options
    can be combined. `key_rows` returns the rows of all keys of run directories; an error about an unknown option may
    suggest one of these keys. Exits after --help. Raises UsageError for a wrong command line.
    """
    siblings: Mapping[str, Any] = {} if isinstance(commands, type) else commands
    if "" in siblings and (not words or words[0] not in siblings):
        commands = siblings[""]
    app = _app(script, texts.description or commands.__doc__ or "", getattr(commands, "help_groups", {}))
    if isinstance(commands, type):
        app.default(commands)
    else:
        if not words:
            raise usage_error(f"COMMAND is missing; known: {', '.join(commands)}")
        if words[0] not in commands and words[0] not in HELP_WORDS:
            raise usage_error(_unknown_command(script, words[0], commands))
        # Assembling a command takes milliseconds, so only the selected one is assembled.
        for name in [words[0]] if words[0] in commands else commands:
            app.command(_app(name, commands[name].__doc__ or "", {}), name=name)
            app[name].default(commands[name])
    try:
        build, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        options = commands if isinstance(commands, type) else commands.get(words[0])
        if build is options:  # otherwise cyclopts prints the help
            _check_options(options, words)
        parsed = build(*bound.args, **bound.kwargs)
    except CycloptsError as error:
        command = "" if isinstance(commands, type) else words[0]
        options = commands if isinstance(commands, type) else commands[command]
        line = CommandLine(script, command, words, options, key_rows)
        raise usage_error(line.problem(error, siblings), command) from error
    except UsageError as error:
        raise usage_error(str(error), "" if isinstance(commands, type) else words[0]) from error
    if parsed is None:  # the help was printed
        if isinstance(commands, type) or words[0].startswith("-"):
            print(texts.epilog, end="")
        sys.exit(EXIT_DONE)
    return parsed


@attrs.frozen
class CommandLine:
    """An invalid command line. `problem` says in our own words what is wrong, using the fields of cyclopts' error."""

    script: str
    command: str  # "" for a script without commands
    words: Sequence[str]
    options: Any  # class or function of the command
    key_rows: Callable[[], KeyRows]  # called only for an unknown option, because it loads the tables

    def problem(self, error: CycloptsError, siblings: Mapping[str, Any]) -> str:
        """Return a usage error as one line. It may suggest one of `siblings`, the commands of the script."""
        if isinstance(error, UnknownOptionError):
            return self._unknown_option(error.token.keyword or error.token.value, siblings)
        if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
            return self._unexpected_argument(error.unused_tokens[0])
        argument = error.argument
        if argument is None:
            return "the command line cannot be read"
        name = argument.name.strip("-.") if _is_positional(argument) else argument.name
        if isinstance(error, MissingArgumentError):
            return f"{name}{self._missing(argument)}"
        if isinstance(error, CoercionError):
            return f"{name}: {_wrong_value(error, argument)}"
        repeated = isinstance(error, RepeatArgumentError)
        return f"{name}: " + ("given twice; give it once" if repeated else f"wanted {_accepted_values(argument)}")

    def _unknown_option(self, option_text: str, siblings: Mapping[str, Any]) -> str:
        word = option_text.partition("=")[0]
        pairs = pairwise([*self.words, "-"])
        values = [first.partition("=")[2] or second for first, second in pairs if first.partition("=")[0] == word]
        value = values[0] if values and not values[0].startswith("-") else ""
        from common.other_programs import option_advice  # imported here because only a usage error needs the table

        sets_keys = "--set" in option_names(self.options)
        command = f"{self.script} {self.command}".rstrip()
        advice = option_advice(command, word, value, self.key_rows(), sets_keys=sets_keys)
        if not advice:
            names = [name for argument in arguments_of(self.options) for name in argument.names if name[:1] == "-"]
            owners = [name for name in siblings if name != self.command and word in option_names(siblings[name])]
            close = closest(word.lower(), names)
            if owners:
                advice = f"; it is an option of {either(f'{self.script} {owner}'.rstrip() for owner in owners)}"
            elif close is not None:
                advice = f"; did you mean {close}?"
        return f"{word}: unknown option{advice}"

    def _unexpected_argument(self, word: str) -> str:
        names = [argument.name.strip("-") for argument in arguments_of(self.options) if _is_positional(argument)]
        from common.other_programs import argument_advice

        before = self.words[self.words.index(word) - 1] if word in self.words[1:] else ""
        if before in [key for rows in self.key_rows().values() for key in rows]:
            return f"unexpected argument {quoted(word)}; to set a key, write --set {before}={word}"
        advice = argument_advice(self.script, self.command, word)
        expected = f"{' '.join(names) or 'no arguments'} and options"
        return f"unexpected argument {quoted(word)}, wanted {expected}{advice}"

    def _last_position(self, argument: Argument) -> int | None:
        """Return the position of the last word that names this option, counted from 1; None if no word does."""
        names = [word.partition("=")[0].replace("_", "-") for word in self.words]
        return max((position for position, name in enumerate(names, 1) if name in argument.names), default=None)

    def _missing(self, argument: Argument) -> str:
        """Return the end of a message about a missing argument, or about an option that was given without its value."""
        position = self._last_position(argument)
        if position is None:
            return f" is missing: {_help_of(argument)[1]}"
        next_words, (count, _) = self.words[position:], argument.token_count()
        values = next((number for number, word in enumerate(next_words) if word.startswith("-")), len(next_words))
        if count > 1:
            return f": got {min(values, count)} of {count} values, wanted {_accepted_values(argument)}"
        advice = f"; if {next_words[0]} is the value, write {argument.name}={next_words[0]}" if next_words else ""
        return f": its value is missing, wanted {_accepted_values(argument)}{advice}"


def _wrong_value(error: CoercionError, argument: Argument) -> str:
    """Return what is wrong with a value: the message of our own check, or what was expected instead."""
    if error.msg is not None:  # the message of our own check
        return str(error.msg)
    value = "" if error.token is None else error.token.value
    if argument.hint is bool:
        return f"got {quoted(value)}, wanted no value"
    # With a lower cutoff, "gpu" would suggest "cpu".
    close = closest(value, argument.get_choices(force=True) or (), cutoff=0.7)
    suggestion = "" if close is None else f"; did you mean {close}?"
    return f"got {quoted(value)}, wanted {_accepted_values(argument)}{suggestion}"


@functools.cache
def arguments_of(options: Any) -> tuple[Argument, ...]:
    """Return the options and positional arguments of a command's class or function."""
    app = _app("", "", {})
    app.default(options)
    return tuple(argument for argument in app.assemble_argument_collection() if argument.parse)


def options_of(options: Any) -> list[Argument]:
    """Return the options of a command's class or function, without its positional arguments."""
    return [argument for argument in arguments_of(options) if not _is_positional(argument) and argument.name != "*"]


def option_names(options: Any) -> list[str]:
    return [name for argument in options_of(options) for name in argument.names]


def _check_options(options: Any, words: Sequence[str]) -> None:
    """Raise UsageError if a command line repeats options, or combines options that cannot be combined."""
    arguments = options_of(options)
    option_values = given_options(arguments, words)
    rules = getattr(options, "option_rules", OptionRules())
    problem = repeated_problem(arguments, option_values)
    problem = problem or rules.problem(without_false_flags(arguments, option_values))
    if problem:
        raise UsageError(problem)


def _is_positional(argument: Argument) -> bool:
    return argument.name.strip("-.").isupper()


def _help_of(argument: Argument) -> tuple[str, str]:
    """Return an argument's metavar and its help text."""
    metavar, _, text = (argument.parameter.help or "").rpartition("\n")
    return metavar, text


def _accepted_values(argument: Argument) -> str:
    choices = argument.get_choices(force=True)
    return either(choices) if choices else _help_of(argument)[0] or "a value"


def _unknown_command(script: str, word: str, commands: Mapping[str, Any]) -> str:
    choices = f"; known: {', '.join(commands)}"  # a shortened list could hide the intended command
    if not word.startswith("-"):
        close = closest(word.lower(), commands)
        suggestion = "" if close is None else f"; did you mean {quoted(close)}?"
        return f"{quoted(word)}: unknown command{suggestion}{choices}"
    owners = [name for name, options in commands.items() if word.partition("=")[0] in option_names(options)]
    example = f", such as {script} {owners[0]} ... {word}" if owners else choices
    return f"COMMAND is missing before {word}{example}"


class PlainHelp(PlainFormatter):
    """Formats the help of cyclopts as plain text, with commands, arguments and options in two columns."""

    def __init__(self, app: App, groups: Mapping[str, str]):
        super().__init__()
        self._app, self._groups = app, groups

    def render_usage(self, console: Any, options: Any, usage: Any) -> None:
        """Print the usage line, with metavars instead of Python's types."""
        line = str(usage).strip()
        for argument in self._app.assemble_argument_collection() if self._app.default_command else ():
            metavar = (argument.parameter.help or "").partition("\n")[0]
            line = re.sub(rf"{re.escape(argument.name)} [A-Z]+", f"{argument.name} {metavar}", line)
        wrapped = textwrap.fill(f"Usage: {line}", WIDTH, subsequent_indent=" " * 7, break_on_hyphens=False)
        print(f"{wrapped}\n")

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:
        """Print the commands, positional arguments or options."""
        entries = [entry for entry in panel.entries if entry.names != ("--help",)]
        if not entries:
            return
        titles = {name: title for title, names in self._groups.items() for name in names.split()}
        rest = ("Other options" if titles else "Arguments and options") if panel.format == "parameter" else "Commands"
        for title in (*self._groups, rest):
            rows = [entry for entry in entries if titles.get(entry.names[0], rest) == title]
            if not rows:
                continue
            advice = (
                f" ({self._app.name[0]} COMMAND --help lists the options of a command)" if title == "Commands" else ""
            )
            print(f"{title}{advice}:")
            for entry in rows:
                # The description is an object of rich or of cyclopts.
                description = getattr(entry.description, "primary_renderable", entry.description)
                metavar, _, text = str(description).rpartition("\n")
                label = f"{entry.names[0]} {'|'.join(entry.choices) if entry.choices else metavar}".rstrip()
                print(described(label, text, None if entry.default in (None, "False", "()") else entry.default))
            print()


def described(label: str, text: str, default: str | None) -> str:
    """Return the help of an option, or of a key, in two columns."""
    text += "" if default is None else f" (default: {default})"
    first = f"  {label:<{NAME_WIDTH}}  "
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=" " * (NAME_WIDTH + 4), break_on_hyphens=False
    )


def _app(name: str, help_text: str, groups: Mapping[str, str]) -> App:
    app = App(
        name=name,
        help=help_text,
        help_format="plaintext",
        version_flags=[],
        # There are no --no-x options. Repetition is allowed here; _check_options refuses it with a better message.
        default_parameter=Parameter(negative=(), allow_repeating=True),
    )
    app.help_formatter = PlainHelp(app, groups)
    return app


def usage_error(problem: str, command: str = "") -> UsageError:
    """Return the error for a wrong command line."""
    return UsageError(f"{f'{command}: ' if command else ''}{printable(problem)}; see --help")
