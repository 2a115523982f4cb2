"""Checks of values: validators of configuration fields and of options' texts; errors name got and wanted."""

from collections.abc import Callable
from typing import Any, get_args

import attrs

from common.errors import LARGEST_INTEGER, either, integer_range, quoted
from common.json_files import LARGEST, SIZES, is_number


@attrs.frozen
class ValueCheck:
    """A condition on a value. As a validator of an attrs field it raises ValueError, "FIELD: got ..., wanted ..."."""

    holds: Callable[[Any], bool]
    wanted: str
    kind: type = str  # of the value that an option's text means

    def __call__(self, _: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not self.holds(value):
            raise ValueError(f"{attribute.name}: {self._problem(value, value)}")

    def parse(self, text: str) -> Any:
        """Return the value that an option's text means. Raises ValueError, "got ..., wanted ..."."""
        try:
            value = self.kind(text)
        except ValueError:
            value = text  # which no check of numbers accepts
        if not self.holds(value):
            raise ValueError(self._problem(value, text))
        return value

    def _problem(self, value: Any, given: Any) -> str:
        size = f": {SIZES}" if self.kind is float and type(value) in (int, float) and not is_number(value) else ""
        return f"got {quoted(given)}, wanted {self.wanted}{size}"


def set_one_form(config: Any, **meant: Any) -> None:
    """Give the fields of a frozen configuration, once checked, the one form that each value has.

    1 of a number field becomes 1.0, and -0.0 becomes 0.0. `meant`: values that null stands for; they become null.
    """
    for field in attrs.fields(type(config)):
        value = getattr(config, field.name)
        if type(value) in (int, float) and float in (field.type, *get_args(field.type)):
            object.__setattr__(config, field.name, value + 0.0)
        if field.name in meant and value == meant[field.name]:
            object.__setattr__(config, field.name, None)


def integer(minimum: int, maximum: int = LARGEST_INTEGER) -> ValueCheck:
    """Accept an int (not a bool) in [minimum, maximum]."""

    def holds(value: Any) -> bool:
        return type(value) is int and minimum <= value <= maximum

    return ValueCheck(holds, f"an integer {integer_range(minimum, maximum)}", int)


def number(
    minimum: float, maximum: float = LARGEST, *, above: bool = False, below: bool = False, example: str = ""
) -> ValueCheck:
    """Accept a float, or an int that can be one, in [minimum, maximum]; `above`, `below`: without that end."""
    wanted = f"a number {'above' if above else 'from'} {minimum:g}"
    wanted += "" if maximum == LARGEST else f"{' and below' if below else ' up to'} {maximum:g}"
    wanted += f", such as {example}" if example else ""

    def holds(value: Any) -> bool:
        if not is_number(value):
            return False
        return (value > minimum if above else value >= minimum) and (value < maximum if below else value <= maximum)

    return ValueCheck(holds, wanted, float)


def text() -> ValueCheck:
    return ValueCheck(lambda value: isinstance(value, str) and value != "", "a non-empty string")


def one_of(*choices: str) -> ValueCheck:
    return ValueCheck(lambda value: value in choices, either(f'"{choice}"' for choice in choices))


def boolean(*others: str) -> ValueCheck:
    """Accept true, false (not 1 or 0), or one of the given strings."""
    wanted = either(["true", "false", *(f'"{other}"' for other in others)])
    return ValueCheck(lambda value: type(value) is bool or value in others, wanted)


def optional(check: ValueCheck) -> ValueCheck:
    """Accept None as well."""
    return attrs.evolve(check, holds=lambda value: value is None or check.holds(value))
