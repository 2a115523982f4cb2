"""Rules on the options of a command that go together: a table, checked where every command line is parsed."""

from collections.abc import Iterable, Mapping, Sequence

import attrs
from cyclopts.argument import Argument

from common.text import either, quoted

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
    # Why an option is refused, if the names do not say it: a table for each kind of rule, by the option
    reasons_unused: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)  # by the mode, or `work`, before that
    reasons_needed: Mapping[str, str] = attrs.field(factory=dict)
    reasons_excluded: Mapping[str, str] = attrs.field(factory=dict)

    def problem(self, given: Given) -> str | None:
        """Return what is wrong with the options of a command line, as one line; None if nothing is."""
        modes = [mode for mode in self.modes if mode in given]
        if len(modes) > 1:
            return f"{' and '.join(modes)} exclude each other; pass one of them"
        unused = self._unused(given, modes[0] if modes else None)
        # Whoever leaves out an unused option need not add another one for it.
        used = {name: values for name, values in given.items() if name not in unused}
        return "; ".join([*unused.values(), *self._without_need(used, given), *self._excluded(used, given)]) or None

    def _unused(self, given: Given, mode: str | None) -> dict[str, str]:
        """Return a sentence for each option that the mode does not use, by the option."""
        if not self.modes:
            return {}
        used = self.uses.split() if mode is None else self.modes[mode].split()
        problems = {}
        for name in given:
            if name == mode or name in used:
                continue
            users = [self.work] if name in self.uses.split() else []
            users += [other for other, names in self.modes.items() if name in names.split()]
            doing = mode or self.work
            reason = _after_colon(self.reasons_unused.get(doing, {}), name)
            problems[name] = f"{name} goes with {either(users)}, not with {doing}{reason}"
        return problems

    def _without_need(self, used: Given, given: Given) -> Iterable[str]:
        """Yield a sentence for each used option without the one that it needs."""
        for name, needs in self.needs.items():
            if name in used and not any(_holds(need, given) for need in needs.split()):
                reason = _after_colon(self.reasons_needed, name)
                yield f"{name} needs {either(map(_shown, needs.split()))}{reason}"

    def _excluded(self, used: Given, given: Given) -> Iterable[str]:
        """Yield a sentence for each used option that has no effect because of another one."""
        for name, others in self.excludes.items():
            for other in others.split():
                if name in used and _holds(other, given):
                    yield f"{name} does not go with {_shown(other)}{_after_colon(self.reasons_excluded, name)}"


def _after_colon(reasons: Mapping[str, str], name: str) -> str:
    return f": {reasons[name]}" if name in reasons else ""


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
            times = "twice" if len(values) == 2 else f"{len(values)} times"
            problems.append(f"{argument.name} is given {times} ({shown}); give it once")
    return "; ".join(problems) or None
