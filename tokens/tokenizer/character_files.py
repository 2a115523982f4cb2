"""Character vocabularies in files: nanoGPT's meta.pkl, of which nothing is executed, and JSON."""

import pickletools
from pathlib import Path
from typing import Any

from common.errors import BadInput
from common.json_files import parse_json, read_regular

SUFFIXES = (".pkl", ".json")
NANOGPT = "meta.pkl"  # beside nanoGPT's tokens
# Instructions of pickles: those that give a string or an integer, keep it under a number, or tell nothing but dicts.
GIVE = {"BININT", "BININT1", "BININT2", "BINUNICODE", "SHORT_BINUNICODE"}
KEEP, REPEAT = {"MEMOIZE", "BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
DICTS = {"PROTO", "FRAME", "EMPTY_DICT", "MARK", "SETITEM", "SETITEMS", "STOP"}


def read_characters(path: Path) -> str:
    """Return the characters of a vocabulary in the order of their ids.

    JSON is a list of characters, an object of ids by character, or the manifest of tokens. Raises BadInput.
    """
    try:
        data = read_regular(path)
        values = _pickled(data) if path.suffix == ".pkl" else parse_json(data, None)
        for key in ("tokenizer", "characters") if isinstance(values, dict) else ():
            values = values.get(key, values)
        ids = values if isinstance(values, dict) else {one: number for number, one in enumerate(values)}
        places = {number: one for one, number in ids.items() if type(number) is int}
        hole = next((number for number in range(max(1, len(values))) if len(str(places.get(number, ""))) != 1), None)
        if hole is not None:
            raise ValueError(f"id {hole} of {len(values):,}: none, or not one character that no other id has")
        characters = "".join(places[number] for number in range(len(values)))
        characters.encode()  # a ValueError, where there are halves of surrogate pairs
        return characters
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise BadInput(
            f"{path}: {error}; wanted nanoGPT's meta.pkl, or JSON: a list of characters, or an object of their ids"
        ) from error


def _pickled(data: bytes) -> dict[Any, Any]:
    """Return the dict `stoi` of a pickle of strings, integers and dicts. Raises ValueError for any other."""
    values: list[Any] = []  # strings and integers, in their order: a key comes before its value
    kept: list[Any] = []
    for opcode, argument, offset in pickletools.genops(data):
        if opcode.name in GIVE:
            values.append(argument)
        elif opcode.name in KEEP:
            kept += values[-1:] or [None]
        elif opcode.name in REPEAT:
            values.append(kept[argument or 0])
        elif opcode.name not in DICTS:
            raise ValueError(f"byte {offset:,}: instruction {opcode.name} is none of a vocabulary, and not followed")
    pairs = values[values.index("stoi") + 1 :]
    end = next((at for at, value in enumerate(pairs) if isinstance(value, str) and len(value) > 1), len(pairs))
    return dict(zip(pairs[:end:2], pairs[1:end:2], strict=True))
