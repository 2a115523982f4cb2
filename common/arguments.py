"""Command lines as typed classes, by cyclopts: options with checked numbers, plain help, usage errors of one line."""

import difflib
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, Token, UnknownOptionError
from cyclopts.help import HelpPanel, PlainFormatter

from common.checks import ValueCheck
from common.errors import EXIT_DONE, EXIT_USAGE, printable, quoted

WIDTH = 80  # of the help, in columns
HELP = ("--help", "-h")
NAME_WIDTH = 22  # of its left column


class UsageError(Exception):
    """Invalid combination of options, raised by the class of a command line. The message is one line."""


def exclude_each_other(given: Mapping[str, bool]) -> None:
    """Raise UsageError if more than one of these options is given: each asks for something else instead of the rest."""
    if len(names := [name for name, is_given in given.items() if is_given]) > 1:
        raise UsageError(f"{' and '.join(names)} exclude each other; pass one of them")


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


def parse(
    script: str, commands: type | Mapping[str, Any], words: Sequence[str], *, help_text: str = "", epilog: str = ""
) -> Any:
    """Return the command line as an instance of its class, or of the class of the command that its first word names.

    A class's docstring describes it in the help. It may have `help_groups`, names of options by title, and `meant`,
    which returns advice on an unknown option and its value. Exits after --help, and with one line on a usage error.
    """
    app = _app(script, help_text or commands.__doc__ or "", getattr(commands, "help_groups", {}))
    if isinstance(commands, type):
        app.default(commands)
    elif not words:
        refuse(script, f"COMMAND is missing; known: {', '.join(commands)}")
    else:
        if words[0] not in (
            *commands,
            *HELP,
        ):  # cyclopts would print the help of all, with status 0, if it is asked for
            known = ", ".join(commands)
            close = difflib.get_close_matches(words[0], commands, n=1, cutoff=0.5)
            advice = f"; did you mean '{close[0]}'?" if close else ""
            refuse(script, f"unknown command {quoted(words[0])}{advice}; known: {known}")
        for name, command in commands.items():
            app.command(_app(name, command.__doc__ or "", {}), name=name)
            app[name].default(command)
    try:
        build, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        value = build(*bound.args, **bound.kwargs)
    except CycloptsError as error:
        unknown = (error.token.keyword or error.token.value) if isinstance(error, UnknownOptionError) else ""
        values = [word.partition("=")[2] or after for word, after in pairwise([*words, ""]) if word.startswith(unknown)]
        advice = commands.meant(unknown, values[0]) if unknown and values and hasattr(commands, "meant") else ""
        problem = f"{unknown}: unknown option{advice}" if advice else _problem(error)
        refuse(script, problem, " ".join(error.command_chain or ()))
    except UsageError as error:
        refuse(script, str(error))
    if value is None:  # the help was printed
        if isinstance(commands, type) or words[0].startswith("-"):
            print(epilog, end="")
        sys.exit(EXIT_DONE)
    return value


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
        default_parameter=Parameter(negative=(), allow_repeating=True),  # no --no-x; of a repeated option, the last
    )
    app.help_formatter = PlainHelp(app, groups)
    return app


def _problem(error: CycloptsError) -> str:
    """Return a usage error as one line; a positional argument is named as in the help."""
    error.verbose = False
    name = "" if error.argument is None else error.argument.name
    if isinstance(error, MissingArgumentError) and error.argument and name.strip("-.").isupper():
        return f"{name.strip('-.')} is missing: {(error.argument.parameter.help or '').rpartition(chr(10))[2]}"
    text = f"{name}: {error.msg}" if name and error.msg is not None else str(error)
    return text.replace(name, name.strip("-.")) if name.isupper() else text


def refuse(script: str, problem: str, command: str = "") -> NoReturn:
    """Exit with EXIT_USAGE, and the problem as one line."""
    print(f"{script}: {f'{command}: ' if command else ''}{printable(problem)}; see --help", file=sys.stderr)
    sys.exit(EXIT_USAGE)
