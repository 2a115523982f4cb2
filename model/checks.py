"""attrs validators for configuration fields; their ValueError names field, got and wanted."""

from collections.abc import Callable
from typing import Any, get_args

import attrs

from common.errors import LARGEST_INTEGER, either, integer_range, quoted
from common.json_files import LARGEST, SIZES, is_number

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


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


def integer(minimum: int, maximum: int = LARGEST_INTEGER) -> Validator:
    """Accept an int (not a bool) in [minimum, maximum]."""
    return _check(
        lambda value: type(value) is int and minimum <= value <= maximum,
        f"an integer {integer_range(minimum, maximum)}",
    )


def number(minimum: float, maximum: float = LARGEST, *, above: bool = False) -> Validator:
    """Accept a float, or an int that can be one, in [minimum, maximum], or in (minimum, maximum] when `above`."""
    low = "above" if above else "from"
    high = "" if maximum == LARGEST else f" up to {maximum:g}"
    wanted = f"a number {low} {minimum:g}{high}"

    def check(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        inside = is_number(value) and (value > minimum if above else value >= minimum) and value <= maximum
        if not inside:
            size = f": {SIZES}" if type(value) in (int, float) and not is_number(value) else ""
            raise ValueError(f"{attribute.name}: got {quoted(value)}, wanted {wanted}{size}")

    return check


def text() -> Validator:
    return _check(lambda value: isinstance(value, str) and value != "", "a non-empty string")


def one_of(*choices: str) -> Validator:
    return _check(lambda value: value in choices, either(f'"{choice}"' for choice in choices))


def boolean(*others: str) -> Validator:
    """Accept true, false (not 1 or 0), or one of the given strings."""
    wanted = either(["true", "false", *(f'"{other}"' for other in others)])
    return _check(lambda value: type(value) is bool or value in others, wanted)


def optional(validator: Validator) -> Validator:
    def check(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if value is not None:
            validator(instance, attribute, value)

    return check


def _check(holds: Callable[[Any], bool], wanted: str) -> Validator:
    def check(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not holds(value):
            raise ValueError(f"{attribute.name}: got {quoted(value)}, wanted {wanted}")

    return check
