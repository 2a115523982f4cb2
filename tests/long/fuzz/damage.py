"""Bad inputs. Each consists of a command and a file that is damaged or replaced with something else."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

Damage = Callable[[Path, random.Random], None]  # damages the file or folder at a path

DEEP = '{"a": ' * 100_000
HUGE = 10**30
ESCAPE = "\x1b[2J\x1b]0;owned\x07"
SPARSE_BYTES = 1 << 33


@attrs.frozen
class Case:
    """One bad input."""

    area: str
    name: str
    command: tuple[str, ...]  # script and arguments; {} is replaced with the path of the workspace
    damage: Damage  # damages a workspace
    survives: bool = False  # status 0 is also correct if the result is the same as with good input


def no_damage(_: Path, __: random.Random) -> None:
    """Do not damage anything: the command line is the bad input."""


def at(name: str, damage: Damage) -> Damage:
    """Return a function that damages a file in a folder."""
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
    """Return a function that replaces the values of some keys in a JSON file."""

    def damage(path: Path, _: random.Random) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return damage


def with_content(content: Callable[[str, random.Random], str | bytes]) -> Damage:
    """Return a function that computes a file's new content from its old text, and writes it."""

    def damage(path: Path, draw: random.Random) -> None:
        new = content(path.read_text(), draw)
        path.write_bytes(new if isinstance(new, bytes) else new.encode(errors="surrogateescape"))

    return damage


def with_other_entry(make: Callable[[Path], Any]) -> Damage:
    """Return a function that replaces a file with another kind of directory entry."""

    def damage(path: Path, _: random.Random) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return damage


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


NO_FILE: dict[str, Damage] = {
    "a folder": with_other_entry(Path.mkdir),
    "a pipe": with_other_entry(os.mkfifo),
    "a device": with_other_entry(lambda path: path.symlink_to("/dev/zero")),
    "a loop of links": with_other_entry(lambda path: path.symlink_to(path)),
}
NO_JSON: dict[str, Damage] = {
    "cut short": with_content(lambda text, draw: text.rstrip()[: draw.randrange(len(text.rstrip()) - 1)]),
    "empty": with_content(lambda *_: ""),
    "deep": with_content(lambda *_: DEEP),
    "deep and closed": with_content(lambda *_: '{"a": ' * 900 + "1" + "}" * 900),
    "UTF-16": with_content(lambda text, _: text.encode("utf-16")),
    "NULs": with_content(lambda text, _: b"\0" * len(text)),
    "random bytes": with_content(lambda text, draw: draw.randbytes(len(text))),
}
NO_OBJECT: dict[str, Damage] = {
    "a list": with_content(lambda *_: "[1, 2]"),
    "a number": with_content(lambda *_: "7"),
    "null": with_content(lambda *_: "null"),
    "Latin-1": with_content(lambda text, _: text.encode().rstrip()[:-1] + b', "\xe9": 1}'),
    "a key twice": with_content(lambda text, _: text.replace("{", '{"fuzz": 1, "fuzz": 2, ', 1)),
    "5,000 digits": with_content(lambda text, _: text.replace("{", '{"fuzz": ' + "9" * 5000 + ", ", 1)),
}
LARGE: dict[str, Damage] = {"8 GiB of NULs": with_other_entry(_sparse)}
MISSING: dict[str, Damage] = {"missing": with_other_entry(lambda _: None)}
JSON_DAMAGES = NO_FILE | NO_JSON | NO_OBJECT | LARGE | MISSING
BYTES: dict[str, Damage] = {
    **{f"cut short {number}": cut for number in range(3)},
    **{f"a flipped bit {number}": flip_bit for number in range(3)},
}
