"""Rows and validators of configuration keys, checks of option texts, JSON values structured as typed attrs classes."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import attrs

from common.errors import InvalidValue, Problem, problem_of
from common.json_files import LARGEST, SIZES, is_number
from common.text import LARGEST_INTEGER, either, integer_range, nearest, quoted

if TYPE_CHECKING:
    from cattrs import Converter

Structured = TypeVar("Structured")
Hook = Callable[[Any, Any], Any]

_SCALARS = {bool: "true or false", int: "an integer of 64 bits", float: "a number", str: "a string"}
_WANTED: dict[type, str] = {**_SCALARS, dict: "an object", list: "an array"}


KEY = "key"  # in a field's metadata: its key in a file, where Python does not allow that as a name


def key_of(field: "attrs.Attribute[Any]") -> str:
    """Return the key by which users give a field."""
    return str(field.metadata.get(KEY, field.alias))


@attrs.frozen
class ValueCheck:
    """A condition on a value. As a validator of an attrs field it raises InvalidValue, "KEY: got ..., wanted ...".

    The key is the name by which a user gives the field.
    """

    holds: Callable[[Any], bool]
    wanted: str
    kind: type = str  # of the value that an option's text means

    def __call__(self, _: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not self.holds(value):
            raise InvalidValue(self._problem(value, value, key_of(attribute)))

    def parse(self, text: str) -> Any:
        """Return the value that an option's text means. Raises InvalidValue, "got ..., wanted ..."."""
        try:
            value = self.kind(text)
        except ValueError:
            value = text  # which no check of numbers accepts
        if not self.holds(value):
            raise InvalidValue(self._problem(value, text))
        return value

    def _problem(self, value: Any, given: Any, key: str = "") -> Problem:
        size = SIZES if self.kind is float and type(value) in (int, float) and not is_number(value) else ""
        return Problem(key=key, found=quoted(given), expected=self.wanted, cause=size)


@attrs.frozen
class OlderSpelling:
    """An earlier name of a key, which files may still have.

    `convert` takes the value of the earlier name and the other keys of the file. It returns the value of the key, or
    raises ValueError, "got ..., wanted ...".
    """

    name: str
    convert: Callable[[Any, Mapping[str, Any]], Any]


@attrs.frozen(kw_only=True)
class KeyRow:
    """The row of a key: all that users are told about it, in the metadata of its field.

    `train.py --keys`, errors about unknown keys and NOTEs come from the rows. Tests compare the tables of docs/ with
    them. Texts are plain, as a terminal shows them.
    """

    meaning: str  # a phrase that makes sense next to the name of the key
    wanted: str  # the accepted values, in the words of the key's check
    recommended: Any = None  # the value in the recommended recipe if that is not the default; None: the default is fine
    # The key changes no trained weight, except by rounding. Runs that differ only in plumbing keys and the seed count
    # as one recipe, so evaluate.py compare takes their difference for noise.
    plumbing: bool = False
    names: str = ""  # names of the same setting in other programs, separated by spaces; the values mean the same
    # What to know about a similar setting of other programs, such as another unit -> its names, separated by spaces
    similar: Mapping[str, str] = attrs.field(factory=dict)
    older: OlderSpelling | None = None

    @property
    def foreign_names(self) -> dict[str, str]:
        """Names in other programs, each with what to know about its values: "" if they mean the same."""
        texts = {"": self.names} | dict(self.similar)
        return {name: note for note, names in texts.items() for name in names.split()}


def key_field(
    check: Callable[..., None],
    default: Any = attrs.NOTHING,
    *,
    wanted: str = "",
    converter: Callable[[Any], Any] | None = None,
    metadata: Mapping[Any, Any] | None = None,
    **row: Any,
) -> Any:
    """Return the field of a key, with its KeyRow; a key without a default is required.

    `wanted` is needed if the check is no ValueCheck, which has these words. `converter` changes the value before the
    check.
    """
    words = wanted or (check.wanted if isinstance(check, ValueCheck) else "")
    assert words, "a check without words: pass `wanted`"
    rows = {KeyRow: KeyRow(wanted=words, **row), **(metadata or {})}
    return attrs.field(default=default, validator=check, converter=converter, metadata=rows)


KeyRows = Mapping[str, Mapping[str, KeyRow]]  # by file, "model" or "train", and key
_NO_ROW = KeyRow(meaning="its field has no row that states its meaning", wanted="any value")


def row_of(field: "attrs.Attribute[Any]") -> KeyRow:
    """Return the row of a key's field; a field that was not defined by `key_field` has one that says so."""
    row: KeyRow = field.metadata.get(KeyRow, _NO_ROW)
    return row


def set_one_form(config: Any, **meant: Any) -> None:
    """Give checked fields one form: 1 of a number field becomes 1.0, -0.0 becomes 0.0, a value in `meant` null."""
    for field in attrs.fields(type(config)):
        value = getattr(config, field.name)
        if type(value) in (int, float) and float in (field.type, *get_args(field.type)):
            object.__setattr__(config, field.name, value + 0.0)
        if field.name in meant and value == meant[field.name]:
            object.__setattr__(config, field.name, None)


def is_absent(value: Any) -> bool:
    """Tell whether a field of somebody else's record holds nothing.

    That is null, a text of white space alone, or an empty list or object. The numbers 0 and false are values.
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


def structured(value: Any, kind: type[Structured], *, unknown_keys: bool = False) -> Structured:
    """Return JSON as `kind`, an attrs class. Raises InvalidValue for the first misfit; `unknown_keys`: ignore those."""
    try:
        return _converter(unknown_keys).structure(value, kind)
    except Exception as error:
        raise InvalidValue(_first_misfit(error)) from error


def checked(kind: type[Structured], values: Any, **given: Any) -> Structured:
    """Return a JSON object as `kind`, an attrs class whose validators check the values; `given` fields are no keys.

    Raises InvalidValue for an unknown or missing key, and as the validators do: "KEY: got ..., wanted ...".
    """
    if not isinstance(values, dict):
        raise InvalidValue(Problem(found=quoted(values), expected="an object of keys and values"))
    fields: Any = attrs.fields(kind)  # type: ignore[arg-type]  # kinds are attrs classes
    keys = {key_of(field): field for field in fields if field.name not in given}
    required = [key for key, field in keys.items() if field.default is attrs.NOTHING]
    for key in values:
        if key not in keys:
            raise InvalidValue(unknown_key(key, keys))
    for key in required:
        if key not in values:
            raise InvalidValue(Problem(key=key, text=f"key '{key}' is missing", advice=f"wanted {', '.join(required)}"))
    return kind(**{keys[key].alias: value for key, value in values.items()}, **given)


def unknown_key(key: str, known: Iterable[str], where: object = "") -> Problem:
    """Return the problem of a key that does not exist, with the nearest one that does."""
    return Problem(where=str(where), key=key, text=f"unknown key {quoted(key)}", advice=nearest(key, known))


def _first_misfit(error: BaseException) -> Problem:
    """Return the first of cattrs' errors in our words: they are nested groups, with a note of the field of each."""
    from cattrs.errors import (
        ClassValidationError,
        ForbiddenExtraKeysError,
        IterableValidationError,
        IterableValidationNote,
    )

    path = ""
    while isinstance(error, ClassValidationError | IterableValidationError):
        in_fields, others = error.group_exceptions()
        if not in_fields:
            error = others[0]
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
    for matches, container, make in (
        (cols.is_sequence, list, cols.homogenous_tuple_structure_factory),
        (cols.is_mutable_sequence, list, cols.list_structure_factory),
        (cols.is_mapping, dict, cols.mapping_structure_factory),
        (attrs.has, dict, gen.make_dict_structure_fn),
    ):
        converter.register_structure_hook_factory(matches, partial(_container_hook, container, make))
    converter.register_structure_hook_func(_reads_records, _checked(dict, lambda value, kind: kind.from_record(value)))
    return converter


def _reads_records(kind: Any) -> bool:
    """Tell whether a class reads the JSON objects of its records itself, such as those of earlier versions."""
    return hasattr(kind, "from_record")


def _container_hook(container: type, make: Callable[..., Hook], kind: Any, converter: "Converter") -> Hook:
    return _checked(container, make(kind, converter))


def _checked(wanted: type, structure: Hook) -> Hook:
    """Refuse values of other types, subclasses included: True is an int, too."""
    accepted = (int, float) if wanted is float else (wanted,)

    def hook(value: Any, kind: Any) -> Any:
        if type(value) not in accepted:
            raise InvalidValue(Problem(found=quoted(value), expected=_WANTED[wanted]))
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
    """Return a scalar as it is: a whole number of a float field stays one in JSON. Refuse numbers beyond arithmetic."""
    if kind in (int, float) and not is_number(value):
        raise InvalidValue(Problem(found=quoted(value), expected=_WANTED[int] if kind is int else SIZES))
    return value
