"""Bad inputs: a command, and a file that is damaged as JSON, as bytes, or as an entry of its folder."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

Damage = Callable[[Path, random.Random], None]  # of the file or folder at a path

DEEP = '{"a": ' * 100_000
HUGE = 10**30
ESCAPE = "\x1b[2J\x1b]0;owned\x07"
SPARSE_BYTES = 1 << 33


@attrs.frozen
class Case:
    """One bad input."""

    area: str
    name: str
    command: tuple[str, ...]  # script and arguments; {} stands for the workspace
    damage: Damage  # of a workspace
    survives: bool = False  # status 0 is right as well, if the result is that of good input


def none(_: Path, __: random.Random) -> None:
    """Leave everything as it is: the command line is the bad input."""


def at(name: str, damage: Damage) -> Damage:
    """Return the damage of a file in a folder."""
    return lambda folder, draw: damage(folder / name, draw)


def flip_bit(path: Path, draw: random.Random) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    """Cut a file short."""
    os.truncate(path, draw.randrange(path.stat().st_size))


def with_keys(**keys: Any) -> Damage:
    """Return the damage of a JSON file that gets other values under some keys."""

    def damage(path: Path, _: random.Random) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return damage


def written(content: Callable[[str, random.Random], str | bytes]) -> Damage:
    """Return the damage of a file that gets another content, made from its text."""

    def damage(path: Path, draw: random.Random) -> None:
        new = content(path.read_text(), draw)
        path.write_bytes(new if isinstance(new, bytes) else new.encode(errors="surrogateescape"))

    return damage


def replaced(make: Callable[[Path], Any]) -> Damage:
    """Return the damage of a file in whose place something else stands."""

    def damage(path: Path, _: random.Random) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return damage


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


NO_FILE: dict[str, Damage] = {
    "a folder": replaced(Path.mkdir),
    "a pipe": replaced(os.mkfifo),
    "a device": replaced(lambda path: path.symlink_to("/dev/zero")),
    "a loop of links": replaced(lambda path: path.symlink_to(path)),
}
NO_JSON: dict[str, Damage] = {
    "cut short": written(lambda text, draw: text.rstrip()[: draw.randrange(len(text.rstrip()) - 1)]),
    "empty": written(lambda *_: ""),
    "deep": written(lambda *_: DEEP),
    "deep and closed": written(lambda *_: '{"a": ' * 900 + "1" + "}" * 900),
    "UTF-16": written(lambda text, _: text.encode("utf-16")),
    "NULs": written(lambda text, _: b"\0" * len(text)),
    "random bytes": written(lambda text, draw: draw.randbytes(len(text))),
}
NO_OBJECT: dict[str, Damage] = {
    "a list": written(lambda *_: "[1, 2]"),
    "a number": written(lambda *_: "7"),
    "null": written(lambda *_: "null"),
    "Latin-1": written(lambda text, _: text.encode().rstrip()[:-1] + b', "\xe9": 1}'),
    "a key twice": written(lambda text, _: text.replace("{", '{"fuzz": 1, "fuzz": 2, ', 1)),
    "5,000 digits": written(lambda text, _: text.replace("{", '{"fuzz": ' + "9" * 5000 + ", ", 1)),
}
LARGE: dict[str, Damage] = {"8 GiB of NULs": replaced(_sparse)}
MISSING: dict[str, Damage] = {"missing": replaced(lambda _: None)}
JSON_DAMAGES = NO_FILE | NO_JSON | NO_OBJECT | LARGE | MISSING
BYTES: dict[str, Damage] = {
    **{f"cut short {number}": cut for number in range(3)},
    **{f"a flipped bit {number}": flip_bit for number in range(3)},
}
