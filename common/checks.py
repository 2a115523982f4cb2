"""Rows and validators of configuration keys, checks of option values, and conversion of JSON to attrs classes."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import attrs

from common.errors import InvalidValue, Problem, problem_of
from common.json_files import LARGEST, SIZES, is_number
from common.text import LARGEST_INTEGER, either, integer_range, nearest, quoted, read_number

if TYPE_CHECKING:
    from cattrs import Converter

Structured = TypeVar("Structured")
Hook = Callable[[Any, Any], Any]

_SCALARS = {bool: "true or false", int: "an integer of 64 bits", float: "a number", str: "a string"}
_KINDS: dict[type, str] = {**_SCALARS, dict: "an object", list: "an array"}


KEY = "key"  # in a field's metadata: the key as users write it, if that is not a valid name in Python


def key_of(field: "attrs.Attribute[Any]") -> str:
    """Return the key that users write for a field."""
    return str(field.metadata.get(KEY, field.alias))


@attrs.frozen
class ValueCheck:
    """A condition that a value must meet.

    As the validator of an attrs field, it raises InvalidValue with the message "KEY: got ..., wanted ...", where KEY is
    the name that users write for the field.
    """

    holds: Callable[[Any], bool]
    accepted_values: str  # in words, for messages and help
    kind: type = str  # the type to which an option's text is converted

    def __call__(self, _: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not self.holds(value):
            raise InvalidValue(self._problem(value, value, key_of(attribute)))

    def parse(self, text: str) -> Any:
        """Convert an option's text to its value. Raises InvalidValue with the message "got ..., wanted ..."."""
        try:
            value = self.kind(text)
        except ValueError:
            value = self.number_from(text, otherwise=text)  # every check of numbers refuses a string
        if not self.holds(value):
            raise InvalidValue(self._problem(value, text))
        return value

    def number_from(self, text: str, *, otherwise: Any) -> Any:
        """Return the number that a user has written, such as 10M, if this check is for numbers and the text is one."""
        number = None if self.kind is str else read_number(text)
        if number is None:
            return otherwise
        return number if self.kind is int else self.kind(number)

    def _problem(self, value: Any, user_input: Any, key: str = "") -> Problem:
        size = SIZES if self.kind is float and type(value) in (int, float) and not is_number(value) else ""
        return Problem(key=key, found=quoted(user_input), expected=self.accepted_values, cause=size)


@attrs.frozen
class OlderSpelling:
    """An earlier name of a key, which existing files may still use.

    `convert` takes two arguments: the value of the earlier key, and a mapping with the file's other keys. It returns
    the value for the current key, or raises ValueError with the message "got ..., wanted ...".
    """

    name: str
    convert: Callable[[Any, Mapping[str, Any]], Any]


@attrs.frozen(kw_only=True)
class KeyRow:
    """The row of a key: everything that users are shown about it. It is stored in the metadata of the key's field.

    `train.py --keys`, errors about unknown keys and NOTEs are made from the rows, and tests compare the tables in docs/
    with them. A row's texts are shown in a terminal, so they contain no markup.
    """

    meaning: str  # a phrase that makes sense next to the name of the key
    accepted_values: str  # a description, usually the one that the key's check provides
    recommended: Any = None  # the value in the recommended recipe; None: the recipe uses the default
    # True: the key does not change the trained weights, except by rounding. If runs differ only in such keys and in the
    # seed, they have the same recipe, so `evaluate.py compare` treats the difference between them as noise.
    plumbing: bool = False
    names: str = ""  # names of the same setting in other programs, separated by spaces; the values mean the same
    # Similar settings of other programs, whose values differ from the key's. This maps each kind of difference, such as
    # "in steps", to the names of the settings that differ in this way, separated by spaces.
    similar: Mapping[str, str] = attrs.field(factory=dict)
    older: OlderSpelling | None = None

    @property
    def foreign_names(self) -> dict[str, str]:
        """Map each name from other programs to a note on how its values differ from ours; "" if they mean the same."""
        texts = {"": self.names} | dict(self.similar)
        return {name: note for note, names in texts.items() for name in names.split()}


def key_field(
    check: Callable[..., None],
    default: Any = attrs.NOTHING,
    *,
    accepted_values: str = "",
    converter: Callable[[Any], Any] | None = None,
    metadata: Mapping[Any, Any] | None = None,
    **row: Any,
) -> Any:
    """Return the attrs field of a key, with its KeyRow. A key without a default is required.

    A ValueCheck describes the values that it accepts. With any other check, pass `accepted_values`. The `converter` is
    applied to the value before the check.
    """
    description = accepted_values or (check.accepted_values if isinstance(check, ValueCheck) else "")
    assert description, "the check does not describe its values: pass `accepted_values`"
    rows = {KeyRow: KeyRow(accepted_values=description, **row), **(metadata or {})}
    return attrs.field(default=default, validator=check, converter=converter, metadata=rows)


KeyRows = Mapping[str, Mapping[str, KeyRow]]  # name of the file ("model" or "train") -> key -> row
_NO_ROW = KeyRow(meaning="no row states what this key means", accepted_values="any value")


def row_of(field: "attrs.Attribute[Any]") -> KeyRow:
    """Return the row of a key's field. For a field that `key_field` did not define, return a row that says so."""
    row: KeyRow = field.metadata.get(KeyRow, _NO_ROW)
    return row


def set_one_form(config: Any, **null_values: Any) -> None:
    """Convert values that mean the same to a single form. `config` is changed in place, after its checks.

    In a number field, 1 becomes 1.0 and -0.0 becomes 0.0. `null_values` maps the name of a field to the
    value that means the same as null in this field. A field with that value becomes null.
    """
    for field in attrs.fields(type(config)):
        value = getattr(config, field.name)
        if type(value) in (int, float) and float in (field.type, *get_args(field.type)):
            object.__setattr__(config, field.name, value + 0.0)
        if field.name in null_values and value == null_values[field.name]:
            object.__setattr__(config, field.name, None)


def is_absent(value: Any) -> bool:
    """Return whether a field of a record from another program is empty.

    Empty means null, a string of white space only, or an empty list or object. 0 and false are values.
    """
    return value is None or (not value.strip() if isinstance(value, str) else value in ([], {}))


def integer(minimum: int, maximum: int = LARGEST_INTEGER) -> ValueCheck:
    """Accept an int (not a bool) in [minimum, maximum]."""

    def holds(value: Any) -> bool:
        return type(value) is int and minimum <= value <= maximum

    return ValueCheck(holds, f"an integer {integer_range(minimum, maximum)}", int)


def number(
    minimum: float, maximum: float = LARGEST, *, above: bool = False, below: bool = False, example: str = ""
) -> ValueCheck:
    """Accept a float, or an int that a float can represent, in [minimum, maximum].

    `above` excludes the minimum, and `below` excludes the maximum.
    """
    accepted_values = f"a number {'above' if above else 'from'} {minimum:g}"
    accepted_values += "" if maximum == LARGEST else f"{' and below' if below else ' up to'} {maximum:g}"
    accepted_values += f", such as {example}" if example else ""

    def holds(value: Any) -> bool:
        if not is_number(value):
            return False
        return (value > minimum if above else value >= minimum) and (value < maximum if below else value <= maximum)

    return ValueCheck(holds, accepted_values, float)


def text() -> ValueCheck:
    return ValueCheck(lambda value: isinstance(value, str) and value != "", "a non-empty string")


def one_of(*choices: str) -> ValueCheck:
    return ValueCheck(lambda value: value in choices, either(f'"{choice}"' for choice in choices))


def boolean(*strings: str) -> ValueCheck:
    """Accept true, false (but not 1 or 0), or one of the strings."""
    accepted_values = either(["true", "false", *(f'"{string}"' for string in strings)])
    return ValueCheck(lambda value: type(value) is bool or value in strings, accepted_values)


def optional(check: ValueCheck) -> ValueCheck:
    """Accept None, and everything that `check` accepts."""
    return attrs.evolve(check, holds=lambda value: value is None or check.holds(value))


def structured(value: Any, kind: type[Structured], *, unknown_keys: bool = False) -> Structured:
    """Convert a JSON value to `kind`, an attrs class. Raises InvalidValue for the first part that does not match.

    With `unknown_keys`, keys that the class does not have are ignored; otherwise they are errors.
    """
    try:
        return _converter(unknown_keys).structure(value, kind)
    except Exception as error:
        raise InvalidValue(_first_misfit(error)) from error


def checked(kind: type[Structured], values: Any, **other_fields: Any) -> Structured:
    """Convert a JSON object to `kind`, an attrs class whose validators check the values.

    `other_fields` are fields that the caller sets; they cannot be keys of the object. Raises InvalidValue for an
    unknown key, a missing key, or a wrong value. For a wrong value, the message is "KEY: got ..., wanted ...".
    """
    if not isinstance(values, dict):
        raise InvalidValue(Problem(found=quoted(values), expected="an object of keys and values"))
    fields: Any = attrs.fields(kind)  # type: ignore[arg-type]  # kinds are attrs classes
    keys = {key_of(field): field for field in fields if field.name not in other_fields}
    required = [key for key, field in keys.items() if field.default is attrs.NOTHING]
    for key in values:
        if key not in keys:
            raise InvalidValue(unknown_key(key, keys))
    for key in required:
        if key not in values:
            raise InvalidValue(Problem(key=key, text=f"key '{key}' is missing", advice=f"wanted {', '.join(required)}"))
    return kind(**{keys[key].alias: value for key, value in values.items()}, **other_fields)


def unknown_key(key: str, existing_keys: Iterable[str], where: object = "") -> Problem:
    """Return a Problem which says that a key does not exist. It suggests the most similar existing key."""
    return Problem(where=str(where), key=key, text=f"unknown key {quoted(key)}", advice=nearest(key, existing_keys))


def _first_misfit(error: BaseException) -> Problem:
    """Return the first of cattrs' errors as a Problem.

    cattrs raises nested groups of errors; a note on each error names the field in which it occurred.
    """
    from cattrs.errors import (
        ClassValidationError,
        ForbiddenExtraKeysError,
        IterableValidationError,
        IterableValidationNote,
    )

    path = ""
    while isinstance(error, ClassValidationError | IterableValidationError):
        in_fields, outside_fields = error.group_exceptions()
        if not in_fields:
            error = outside_fields[0]
            continue
        error, note = in_fields[0]
        if isinstance(note, IterableValidationNote):
            path += f"[{note.index!r}]"
        else:
            path += f".{note.name}" if path else note.name
    if isinstance(error, KeyError):
        return Problem(key=path, text=f"{path}: missing")
    if isinstance(error, ForbiddenExtraKeysError):
        fields: Any = attrs.fields(error.cl)
        return unknown_key(min(error.extra_fields), (field.alias for field in fields), path)
    problem = problem_of(error)
    return problem.at(path) if problem.key or problem.text else replace(problem, key=path)


@cache
def _converter(unknown_keys: bool) -> "Converter":
    from cattrs import Converter, cols, gen

    converter = Converter(forbid_extra_keys=not unknown_keys)
    for kind in _SCALARS:
        converter.register_structure_hook(kind, _checked(kind, _scalar))
    converter.register_structure_hook_func(_is_literal, _literal)
    for predicate, container, make in (
        (cols.is_sequence, list, cols.homogenous_tuple_structure_factory),
        (cols.is_mutable_sequence, list, cols.list_structure_factory),
        (cols.is_mapping, dict, cols.mapping_structure_factory),
        (attrs.has, dict, gen.make_dict_structure_fn),
    ):
        converter.register_structure_hook_factory(predicate, partial(_container_hook, container, make))
    converter.register_structure_hook_func(_reads_records, _checked(dict, lambda value, kind: kind.from_record(value)))
    return converter


def _reads_records(kind: Any) -> bool:
    """Return whether a class parses its own JSON objects, for example because earlier versions wrote other keys."""
    return hasattr(kind, "from_record")


def _container_hook(container: type, make: Callable[..., Hook], kind: Any, converter: "Converter") -> Hook:
    return _checked(container, make(kind, converter))


def _checked(json_type: type, structure: Hook) -> Hook:
    """Return a hook that accepts only values of this JSON type.

    It refuses instances of subclasses, because True is an instance of int.
    """
    accepted_types = (int, float) if json_type is float else (json_type,)

    def hook(value: Any, kind: Any) -> Any:
        if type(value) not in accepted_types:
            raise InvalidValue(Problem(found=quoted(value), expected=_KINDS[json_type]))
        return structure(value, kind)

    return hook


def _is_literal(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is Literal


def _literal(value: Any, kind: Any) -> Any:
    choices = get_args(kind)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise InvalidValue(Problem(found=quoted(value), expected=either(json.dumps(choice) for choice in choices)))
    return value


def _scalar(value: Any, kind: Any) -> Any:
    """Return a scalar unchanged, so that an integer in a float field stays an integer when it is written as JSON again.

    Numbers that are too large or too small to calculate with are refused.
    """
    if kind in (int, float) and not is_number(value):
        raise InvalidValue(Problem(found=quoted(value), expected=_KINDS[int] if kind is int else SIZES))
    return value
