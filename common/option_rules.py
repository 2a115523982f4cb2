"""Which options of a command go together, as a table that is checked where every command line is parsed."""

from collections.abc import Iterable, Mapping, Sequence

import attrs
from cyclopts.argument import Argument

from common.errors import either, quoted

Given = Mapping[str, Sequence[str]]  # the values of each option of a command line, by the option's first name
FALSE = ("false", "f", "no", "n", "0")  # --follow=false is as if the flag were not given


@attrs.frozen(kw_only=True)
class OptionRules:
    """The rules of one command.

    A mode is an option that asks for something else instead of the command's usual work; at most one can be given. An
    option is refused unless the mode uses it, because it would have no effect. In a command with modes, each option is
    a mode or is used by one: an option that somebody adds and forgets here is refused everywhere.

    In the tables, options are separated by spaces. A value may follow an option as `--to=wandb`.
    """

    work: str = ""  # what the command does without a mode, as a message calls it: "training"
    uses: str = ""  # options of the usual work
    modes: Mapping[str, str] = attrs.field(factory=dict)  # options that each mode uses, by the mode
    needs: Mapping[str, str] = attrs.field(factory=dict)  # an option, and those of which it needs one
    excludes: Mapping[str, str] = attrs.field(factory=dict)  # an option, and those that leave it without an effect
    reasons: Mapping[str, str] = attrs.field(factory=dict)  # why an option is refused, where the names do not say it

    def problem(self, given: Given) -> str | None:
        """Return what is wrong with the options of a command line, as one line; None if nothing is."""
        modes = [mode for mode in self.modes if mode in given]
        if len(modes) > 1:
            return f"{' and '.join(modes)} exclude each other; pass one of them"
        return "; ".join([*self._unused(given, modes), *self._without_need(given), *self._excluded(given)]) or None

    def _unused(self, given: Given, modes: Sequence[str]) -> Iterable[str]:
        """Yield a sentence for each option that the mode does not use."""
        if not self.modes:
            return
        mode = modes[0] if modes else None
        used = self.uses.split() if mode is None else self.modes[mode].split()
        for name in given:
            if name == mode or name in used:
                continue
            users = [self.work] if name in self.uses.split() else []
            users += [other for other, names in self.modes.items() if name in names.split()]
            yield f"{name} goes with {either(users)}, not with {mode or self.work}{self._reason(name)}"

    def _without_need(self, given: Given) -> Iterable[str]:
        """Yield a sentence for each option without the one that it needs."""
        for name, needs in self.needs.items():
            if name in given and not any(_holds(need, given) for need in needs.split()):
                yield f"{name} needs {either(map(_shown, needs.split()))}{self._reason(name)}"

    def _excluded(self, given: Given) -> Iterable[str]:
        """Yield a sentence for each option that has no effect because of another one."""
        for name, others in self.excludes.items():
            for other in others.split():
                if name in given and _holds(other, given):
                    yield f"{name} does not go with {_shown(other)}{self._reason(name)}"

    def _reason(self, name: str) -> str:
        return f": {self.reasons[name]}" if name in self.reasons else ""


def _holds(condition: str, given: Given) -> bool:
    name, equals, value = condition.partition("=")
    return name in given and (not equals or value in given[name])


def _shown(condition: str) -> str:
    return condition.replace("=", " ")


def given_options(arguments: Iterable[Argument], words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each option that is given, by its first name, in the order of the command line.

    Of a flag, a value is "". A word that begins with a hyphen is never the value of the option before it, and after
    the word -- there are no options.
    """
    by_name = {name: argument for argument in arguments for name in argument.names if name.startswith("-")}
    given: dict[str, list[str]] = {}
    for number, word in enumerate(words):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        argument = by_name.get(name.replace("_", "-"))
        if argument is None:
            continue
        if not equals:
            count = 0 if argument.hint is bool else argument.token_count()[0]
            value = " ".join(words[number + 1 : number + 1 + count])
        given.setdefault(argument.name, []).append(value)
    return given


def without_false_flags(arguments: Iterable[Argument], given: Given) -> Given:
    """Return the options of a command line without the flags that it sets to false."""
    flags = {argument.name for argument in arguments if argument.hint is bool}
    return {name: values for name, values in given.items() if name not in flags or values[-1].lower() not in FALSE}


def repeated_problem(arguments: Iterable[Argument], given: Given) -> str | None:
    """Return the options that take one value and got several, as one line; None if there is none.

    A flag may be repeated: it says the same each time.
    """
    from common.redaction import redacted  # a usage error alone needs it

    problems = []
    for argument in arguments:
        values = given.get(argument.name, [])
        is_list = argument.token_count()[1]
        if len(values) > 1 and not is_list and any(values):
            shown = " and ".join(quoted(redacted(value)) for value in values)
            problems.append(f"{argument.name}: got {shown}, wanted it once")
    return "; ".join(problems) or None
