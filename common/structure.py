"""JSON values as typed attrs classes, structured by cattrs without converting types."""

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from common.errors import nearest, quoted

if TYPE_CHECKING:
    from cattrs import Converter

Structured = TypeVar("Structured")

_WANTED = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def structured(value: Any, kind: type[Structured], *, unknown_keys: bool = False) -> Structured:
    """Return a JSON value as `kind`, an attrs class. Raises ValueError naming the first field that does not fit.

    Missing keys get the default of their field. `unknown_keys`: ignore keys without a field instead of refusing them.
    """
    from cattrs import transform_error

    try:
        return _converter(unknown_keys).structure(value, kind)
    except Exception as error:  # cattrs: groups of errors, one for each field
        problem, _, field = transform_error(error, "", _problem)[0].rpartition(" @ ")
        raise ValueError(f"{field.removeprefix('.')}: {problem}" if field else problem) from error


def checked(kind: type[Structured], values: Any, **given: Any) -> Structured:
    """Return a JSON object as `kind`, an attrs class whose validators check the values; `given` fields are no keys.

    Raises ValueError for an unknown or missing key, and as the validators do: "KEY: got ..., wanted ...".
    """
    if not isinstance(values, dict):
        raise ValueError(f"got {quoted(values)}, wanted an object of keys and values")
    fields: Any = attrs.fields(kind)  # type: ignore[arg-type]  # kinds are attrs classes
    keys = {field.alias: field.default is attrs.NOTHING for field in fields if field.name not in given}
    required = [key for key, needed in keys.items() if needed]
    for key in values:
        if key not in keys:
            raise ValueError(f"unknown key {quoted(key)}{nearest(key, keys)}")
    for key in required:
        if key not in values:
            raise ValueError(f"key '{key}' is missing; wanted {', '.join(required)}")
    return kind(**values, **given)


@cache
def _converter(unknown_keys: bool) -> "Converter":
    from cattrs import Converter

    converter = Converter(forbid_extra_keys=not unknown_keys)
    for kind, wanted in _WANTED.items():
        converter.register_structure_hook(kind, _checked(kind, wanted))
    return converter


def _checked(kind: type, wanted: str) -> Any:
    accepted = (int, float) if kind is float else (kind,)

    def check(value: Any, _: type) -> Any:
        if type(value) not in accepted:  # True is an int, too
            raise ValueError(f"got {quoted(value)}, wanted {wanted}")
        return value  # as it is: a whole number of a float field stays one in JSON

    return check


def _problem(error: BaseException, _: type | None) -> str:
    if isinstance(error, KeyError):
        return "missing"
    if isinstance(error, AttributeError | TypeError):  # a list in the place of an object, say
        return "got a value of another kind"
    return str(error)
