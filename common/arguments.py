"""Command lines as typed classes, by cyclopts: options with checked numbers, plain help, usage errors of one line."""

import difflib
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
from common.text import either, printable, quoted

WIDTH = 80  # of the help, in columns
NAME_WIDTH = 22  # of its left column
HELP_WORDS = ("--help", "-h")


@attrs.frozen(kw_only=True)
class ScriptTexts:
    """Texts in the help of a script, before and after its options."""

    description: str = ""  # of a script with commands; the class of a single command describes it by its docstring
    epilog: str = ""


NO_TEXTS = ScriptTexts()


@attrs.frozen
class Command:
    """A command of a script: its options, and the function that carries it out.

    The function is named by its module, which is imported when the command runs, so that --help is quick. It takes the
    options, and returns the exit status, or None for success.
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
    """Return an option's help, and where it differs its name. Of several names, the help shows the first.

    `check`: of its value, or a function that returns the value of a text, or raises ValueError. Positional arguments
    have their metavar as `name`.
    """

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        read = check.parse if isinstance(check, ValueCheck) else check
        assert read is not None
        values = tuple(read(token.value) for token in tokens)
        return values if len(values) > 1 else values[0]

    converter = None if check is None else convert
    # The first line of the help is the metavar, which cyclopts does not know: PlainHelp splits it off.
    return Parameter(name=name, help=f"{metavar}\n{help_text}", converter=converter, required=required)


def read_command(
    script: str,
    commands: Mapping[str, Command],
    words: Sequence[str],
    *,
    texts: ScriptTexts = NO_TEXTS,
    key_rows: Callable[[], KeyRows] = dict,
) -> tuple[Command, Any]:
    """Return the command that a command line names, and its options; the arguments and errors are those of `parse`.

    A script without commands has a single one, named "".
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
    """Return the command line as an instance of its class, or of the class of the command that its first word names.

    A class's docstring describes it in the help. It may have `help_groups`, names of options by title, and
    `option_rules`, which say what options go together. A command named "" is meant if the first word names no other
    one. `key_rows` returns the rows of the keys of run directories, by file: an error about an unknown option may name
    one. Exits after --help. Raises UsageError.
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
        for name in [words[0]] if words[0] in commands else commands:  # to assemble a command takes milliseconds
            app.command(_app(name, commands[name].__doc__ or "", {}), name=name)
            app[name].default(commands[name])
    try:
        build, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        options = commands if isinstance(commands, type) else commands.get(words[0])
        if build is options:  # not the help
            _check_options(options, words)
        value = build(*bound.args, **bound.kwargs)
    except CycloptsError as error:
        command = "" if isinstance(commands, type) else words[0]
        options = commands if isinstance(commands, type) else commands[command]
        line = CommandLine(script, command, words, options, key_rows)
        raise usage_error(line.problem(error, siblings), command) from error
    except UsageError as error:
        raise usage_error(str(error), "" if isinstance(commands, type) else words[0]) from error
    if value is None:  # the help was printed
        if isinstance(commands, type) or words[0].startswith("-"):
            print(texts.epilog, end="")
        sys.exit(EXIT_DONE)
    return value


@attrs.frozen
class CommandLine:
    """A command line that is wrong, and what is wrong with it, in our words: cyclopts' errors are read as data."""

    script: str
    command: str  # "" for a script without commands
    words: Sequence[str]
    options: Any  # class or function of the command
    key_rows: Callable[[], KeyRows]  # called for an unknown option: it loads the tables

    def problem(self, error: CycloptsError, siblings: Mapping[str, Any]) -> str:
        """Return a usage error as one line. `siblings`: all commands of the script, whose options it may name."""
        if isinstance(error, UnknownOptionError):
            return self._unknown_option(error.token.keyword or error.token.value, siblings)
        if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
            return self._too_many(error.unused_tokens[0])
        argument = error.argument
        if argument is None:
            return "the command line cannot be read"
        name = argument.name.strip("-.") if _is_positional(argument) else argument.name
        if isinstance(error, MissingArgumentError):
            return f"{name}{self._missing(argument)}"
        if isinstance(error, CoercionError):
            return f"{name}: {_wrong_value(error, argument)}"
        repeated = isinstance(error, RepeatArgumentError)
        return f"{name}: " + ("given twice; give it once" if repeated else f"wanted {_wanted(argument)}")

    def _unknown_option(self, given: str, siblings: Mapping[str, Any]) -> str:
        word = given.partition("=")[0]
        followed = pairwise([*self.words, "-"])
        values = [one.partition("=")[2] or after for one, after in followed if one.partition("=")[0] == word]
        value = values[0] if values and not values[0].startswith("-") else ""
        from common.other_programs import option_advice  # a usage error alone needs the table

        sets_keys = "--set" in option_names(self.options)
        command = f"{self.script} {self.command}".rstrip()
        advice = option_advice(command, word, value, self.key_rows(), sets_keys=sets_keys)
        if not advice:
            names = [name for argument in arguments_of(self.options) for name in argument.names if name[:1] == "-"]
            owners = [name for name, other in siblings.items() if name != self.command and word in option_names(other)]
            close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
            if owners:
                advice = f"; it is one of {either(f'{self.script} {owner}'.rstrip() for owner in owners)}"
            elif close:
                advice = f"; did you mean {close[0]}?"
        return f"{word}: unknown option{advice}"

    def _too_many(self, argument: str) -> str:
        wanted = " ".join(one.name.strip("-") for one in arguments_of(self.options) if _is_positional(one))
        from common.other_programs import argument_advice

        advice = argument_advice(self.script, self.command, argument)
        return f"got {quoted(argument)} besides, wanted {wanted or 'no arguments'} and options{advice}"

    def _place_of(self, argument: Argument) -> int | None:
        """Return the number of the last word that gives an option, counted from 1; None if no word does."""
        spelled = [word.partition("=")[0].replace("_", "-") for word in self.words]
        return max((number for number, word in enumerate(spelled, 1) if word in argument.names), default=None)

    def _missing(self, argument: Argument) -> str:
        """Return what is missing: the argument, or the value of an option that is there."""
        place = self._place_of(argument)
        if place is None:
            return f" is missing: {_help_of(argument)[1]}"
        values, (count, _) = self.words[place:], argument.token_count()
        got = next((number for number, word in enumerate(values) if word.startswith("-")), len(values))
        if count > 1:
            return f": got {min(got, count)} of {count} values, wanted {_wanted(argument)}"
        advice = f"; if {values[0]} is the value, write {argument.name}={values[0]}" if values else ""
        return f": its value is missing, wanted {_wanted(argument)}{advice}"


def _wrong_value(error: CoercionError, argument: Argument) -> str:
    """Return what is wrong with a value: a check's own words, or what was wanted instead."""
    if error.msg is not None:  # of our check
        return str(error.msg)
    value = "" if error.token is None else error.token.value
    if argument.hint is bool:
        return f"got {quoted(value)}, wanted no value"
    close = difflib.get_close_matches(value, argument.get_choices(force=True) or (), n=1, cutoff=0.6)
    return f"got {quoted(value)}, wanted {_wanted(argument)}" + (f"; did you mean {close[0]}?" if close else "")


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
    """Raise UsageError if options of a command line are repeated or do not go together."""
    arguments = options_of(options)
    given = given_options(arguments, words)
    rules = getattr(options, "option_rules", OptionRules())
    if problem := repeated_problem(arguments, given) or rules.problem(without_false_flags(arguments, given)):
        raise UsageError(problem)


def _is_positional(argument: Argument) -> bool:
    return argument.name.strip("-.").isupper()


def _help_of(argument: Argument) -> tuple[str, str]:
    """Return the metavar of an argument, and its help."""
    metavar, _, text = (argument.parameter.help or "").rpartition("\n")
    return metavar, text


def _wanted(argument: Argument) -> str:
    choices = argument.get_choices(force=True)
    return either(choices) if choices else _help_of(argument)[0] or "a value"


def _unknown_command(script: str, word: str, commands: Mapping[str, Any]) -> str:
    known = f"; known: {', '.join(commands)}"  # all of them: a list that is cut off hides the one that was meant
    if not word.startswith("-"):
        close = difflib.get_close_matches(word.lower(), commands, n=1, cutoff=0.6)
        meant = f"; did you mean {quoted(close[0])}?" if close else ""
        return f"{quoted(word)}: unknown command{meant}{known}"
    owners = [name for name, options in commands.items() if word.partition("=")[0] in option_names(options)]
    example = f", such as {script} {owners[0]} ... {word}" if owners else known
    return f"COMMAND is missing before {word}{example}"


class PlainHelp(PlainFormatter):
    """Help of cyclopts as plain text, with commands, arguments and options in two columns."""

    def __init__(self, app: App, groups: Mapping[str, str]):
        super().__init__()
        self._app, self._groups = app, groups

    def render_usage(self, console: Any, options: Any, usage: Any) -> None:
        """Print the usage line, with metavars instead of Python's types."""
        line = str(usage).strip()
        for argument in self._app.assemble_argument_collection() if self._app.default_command else ():
            metavar = (argument.parameter.help or "").partition("\n")[0]
            line = re.sub(rf"{re.escape(argument.name)} [A-Z]+", f"{argument.name} {metavar}", line)
        print(f"Usage: {line}\n")

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:
        """Print the commands, positional arguments or options."""
        entries = [entry for entry in panel.entries if entry.names != ("--help",)]
        if not entries:
            return
        named = {name: title for title, names in self._groups.items() for name in names.split()}
        rest = ("Other options" if named else "Arguments and options") if panel.format == "parameter" else "Commands"
        for title in (*self._groups, rest):
            rows = [entry for entry in entries if named.get(entry.names[0], rest) == title]
            if not rows:
                continue
            print(f"{title}:")
            for entry in rows:
                description = getattr(entry.description, "primary_renderable", entry.description)  # rich's or cyclopts'
                metavar, _, text = str(description).rpartition("\n")
                label = f"{entry.names[0]} {'|'.join(entry.choices) if entry.choices else metavar}".rstrip()
                print(described(label, text, None if entry.default in (None, "False", "()") else entry.default))
            print()


def described(label: str, text: str, default: str | None) -> str:
    """Return an option, or a key, in two columns."""
    text += "" if default is None else f" (default: {default})"
    first = f"  {label:<{NAME_WIDTH}}  "
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * (NAME_WIDTH + 4))


def _app(name: str, help_text: str, groups: Mapping[str, str]) -> App:
    app = App(
        name=name,
        help=help_text,
        help_format="plaintext",
        version_flags=[],
        default_parameter=Parameter(negative=(), allow_repeating=True),  # no --no-x; _check_options refuses
    )
    app.help_formatter = PlainHelp(app, groups)
    return app


def usage_error(problem: str, command: str = "") -> UsageError:
    """Return the error of a command line that is wrong."""
    return UsageError(f"{f'{command}: ' if command else ''}{printable(problem)}; see --help")
