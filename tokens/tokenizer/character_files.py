"""Character vocabularies in files: nanoGPT's meta.pkl, of which nothing is executed, and JSON."""

import pickletools
from pathlib import Path
from typing import Any

from common.errors import BadInput
from common.json_files import parse_json, read_regular

SUFFIXES = (".pkl", ".json")
NANOGPT = "meta.pkl"  # beside nanoGPT's tokens
DICTS = {"PROTO", "FRAME", "EMPTY_DICT", "MARK", "SETITEM", "SETITEMS", "STOP"}  # instructions of a pickle


def read_characters(path: Path) -> str:
    """Return the characters of meta.pkl, a JSON list, object of ids, or manifest, by their ids. Raises BadInput."""
    try:
        data = read_regular(path)
        values = _pickled(data) if path.suffix == ".pkl" else parse_json(data, None)
        for key in ("tokenizer", "characters") if isinstance(values, dict) else ():
            values = values.get(key, values)
        ids = values if isinstance(values, dict) else {one: number for number, one in enumerate(values)}
        if sorted(ids.values()) != [*range(len(values))] or {*map(len, ids)} != {1}:
            raise ValueError(f"got {len(values):,} entries, wanted single characters with the ids 0, 1, 2, ... once")
        "".join(ids).encode()  # a ValueError, where there are halves of surrogate pairs
        return "".join(sorted(ids, key=ids.__getitem__))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        wanted = "nanoGPT's meta.pkl, or JSON: a list of characters, or an object of their ids"
        raise BadInput(f"{path}: {getattr(error, 'strerror', None) or error}; wanted {wanted}") from error


def _pickled(data: bytes) -> dict[Any, Any]:
    """Return the dict `stoi`, the last one, of a pickle. Raises ValueError for an instruction of any other pickle."""
    values: list[Any] = []  # strings and integers, in their order: a key comes before its value
    kept: list[Any] = []
    for opcode, argument, offset in pickletools.genops(data):
        name = opcode.name.removeprefix("SHORT_").removeprefix("LONG_").rstrip("12")  # of shorter and longer numbers
        if name in ("BININT", "BINUNICODE"):
            values.append(argument)
        elif name in ("BINPUT", "MEMOIZE"):
            kept += values[-1:] or [None]
        elif name == "BINGET":
            values.append(kept[argument or 0])
        elif name not in DICTS:
            raise ValueError(f"byte {offset:,}: instruction {opcode.name} is none of a vocabulary, and not followed")
    pairs = values[values.index("stoi") + 1 :]
    return dict(zip(pairs[::2], pairs[1::2], strict=True))
