"""Rules about which options of a command can be combined: a table that is checked when a command line is parsed."""

from collections.abc import Iterable, Mapping, Sequence

import attrs
from cyclopts.argument import Argument

from common.text import either, quoted

OptionValues = Mapping[str, Sequence[str]]  # first name of an option -> its values on a command line
FALSE = ("false", "f", "no", "n", "0")  # values that turn a flag off, as in "--follow=false"


@attrs.frozen(kw_only=True)
class OptionRules:
    """The rules of one command.

    A mode is an option that makes the command do something else instead of its usual work. A command line can have at
    most one mode. An option that the mode does not use is refused, because it would have no effect. In a command with
    modes, each option must be a mode, or be listed under at least one mode or the usual work. A new option that is not
    listed is refused everywhere.

    In the tables, options are separated by spaces. A condition on an option's value is written as `--to=wandb`.
    """

    work: str = ""  # the name of the usual work in messages, such as "training"
    uses: str = ""  # the options of the usual work
    modes: Mapping[str, str] = attrs.field(factory=dict)  # mode -> the options that it uses
    needs: Mapping[str, str] = attrs.field(factory=dict)  # option -> options; it needs at least one of them
    excludes: Mapping[str, str] = attrs.field(factory=dict)  # option -> options that make it ineffective
    # Why an option is refused, if its name does not show the reason. There is one table for each kind of rule.
    reasons_unused: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)  # mode, or `work` -> option -> reason
    reasons_needed: Mapping[str, str] = attrs.field(factory=dict)
    reasons_excluded: Mapping[str, str] = attrs.field(factory=dict)

    def problem(self, option_values: OptionValues) -> str | None:
        """Return what is wrong with the options of a command line, as one line; None if they are fine."""
        modes = [mode for mode in self.modes if mode in option_values]
        if len(modes) > 1:
            return f"{' and '.join(modes)} exclude each other; pass one of them"
        unused = self._unused(option_values, modes[0] if modes else None)
        # The user has to remove the unused options, so nothing else is reported about them.
        used = {name: values for name, values in option_values.items() if name not in unused}
        problems = [*unused.values(), *self._missing(used, option_values), *self._excluded(used, option_values)]
        return "; ".join(problems) or None

    def _unused(self, option_values: OptionValues, mode: str | None) -> dict[str, str]:
        """Return the options that the mode does not use. Each is mapped to a sentence that explains the problem."""
        if not self.modes:
            return {}
        used = self.uses.split() if mode is None else self.modes[mode].split()
        problems = {}
        for name in option_values:
            if name == mode or name in used:
                continue
            users = [self.work] if name in self.uses.split() else []
            users += [user for user, names in self.modes.items() if name in names.split()]
            active = mode or self.work
            reason = _after_colon(self.reasons_unused.get(active, {}), name)
            problems[name] = f"{name} goes with {either(users)}, not with {active}{reason}"
        return problems

    def _missing(self, used: OptionValues, option_values: OptionValues) -> Iterable[str]:
        """Yield a sentence for each option in `used` that needs other options, if the command line has none of them."""
        for name, needs in self.needs.items():
            if name in used and not any(_is_met(need, option_values) for need in needs.split()):
                reason = _after_colon(self.reasons_needed, name)
                yield f"{name} needs {either(map(_shown, needs.split()))}{reason}"

    def _excluded(self, used: OptionValues, option_values: OptionValues) -> Iterable[str]:
        """Yield a sentence for each option in `used` that has no effect because of another option."""
        for name, conditions in self.excludes.items():
            for condition in conditions.split():
                if name in used and _is_met(condition, option_values):
                    reason = _after_colon(self.reasons_excluded, name)
                    yield f"{name} cannot be combined with {_shown(condition)}{reason}"


def _after_colon(reasons: Mapping[str, str], name: str) -> str:
    return f": {reasons[name]}" if name in reasons else ""


def _is_met(condition: str, option_values: OptionValues) -> bool:
    name, equals, value = condition.partition("=")
    return name in option_values and (not equals or value in option_values[name])


def _shown(condition: str) -> str:
    return condition.replace("=", " ")


def given_options(arguments: Iterable[Argument], words: Sequence[str]) -> dict[str, list[str]]:
    """Map the first name of each option on a command line to its values, in the order of the command line.

    The value of a flag is "". A word that starts with a hyphen is never the value of the option before it, and words
    after -- are not options.
    """
    by_name = {name: argument for argument in arguments for name in argument.names if name.startswith("-")}
    option_values: dict[str, list[str]] = {}
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
        option_values.setdefault(argument.name, []).append(value)
    return option_values


def without_false_flags(arguments: Iterable[Argument], option_values: OptionValues) -> OptionValues:
    """Return the options of a command line without the flags that it sets to false."""
    flags = {argument.name for argument in arguments if argument.hint is bool}
    return {
        name: values for name, values in option_values.items() if name not in flags or values[-1].lower() not in FALSE
    }


def repeated_problem(arguments: Iterable[Argument], option_values: OptionValues) -> str | None:
    """Return one line about the options that accept only one value but were given several; None if there are none.

    A flag may be repeated, because it means the same each time.
    """
    from common.redaction import redacted  # imported here because only a usage error needs it

    problems = []
    for argument in arguments:
        values = option_values.get(argument.name, [])
        is_list = argument.token_count()[1]
        if len(values) > 1 and not is_list and any(values):
            shown = " and ".join(quoted(redacted(value)) for value in values)
            times = "twice" if len(values) == 2 else f"{len(values)} times"
            problems.append(f"{argument.name} is given {times} ({shown}); give it once")
    return "; ".join(problems) or None
