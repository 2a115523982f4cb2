"""Secrets in text: this module alone decides what must not be recorded, printed or published.

It is called before texts like these are recorded: the command line of a run, the name of a source, the text of an
error, or a server's message. It looks for the values of secret variables in the environment, for the usual forms of
keys, and for the places where people put keys: the user, password and query of a URL, headers, and options and settings
whose names show that they are secret. A key in any other place cannot be recognized. Therefore the command of --then,
which may contain anything, is not recorded.
"""

import base64
import functools
import os
import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "[secret]"
SHORTEST_KEY = 8  # in characters; shorter keys are not searched for, because they may be words, such as EMPTY
WORDS = frozenset(  # if a name ends with one of these words, its value is a secret
    (
        *("key", "token", "secret", "password", "passwd", "passphrase", "pwd", "pass", "credential", "credentials"),
        *("auth", "authorization", "bearer", "cookie", "jwt", "otp", "sas", "sig", "signature", "policy"),
        *("apikey", "accesskey", "secretkey", "accountkey", "authtoken", "accesstoken", "sharedaccesssignature"),
    )
)
# After one of these words, "token" means a token of a text, as in start_val_token, eos_token and last-token
OF_TEXT = frozenset(
    (
        *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "special", "val", "validation", "train", "start", "end"),
        *("first", "last", "next", "per", "text", "image", "stop"),
    )
)
ALWAYS = frozenset(("secret", "password", "passwd", "passphrase"))  # any name that contains such a word is secret
HARMLESS = re.compile(r"[-+]?[\d_.,]{1,19}(e[-+]?\d+)?|true|false|null|none|yes|no|value|\[secret\]", re.IGNORECASE)
_VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s&;,'"<>#]+""")
_NAME = re.compile(r"""(?<![\w-])-{0,2}([A-Za-z][\w.-]*)(["']?\s*[=:]\s*)|(?<!\S)--?([A-Za-z][\w-]*)\s+""")
_LOGIN = re.compile(r"(?<!\S)(-u|--user)(\s+|=)[^\s:]+:\S+")
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|x-[\w-]*(?:key|token|auth|secret)[\w-]*)(\s*[:=]\s*)([^'\"\n]+)"
)
_SCHEME = re.compile(r"(?i)\b(bearer|basic)(\s+)((?=[\w.~+/-]*[\d=+/])[\w.~+/-]{6,}=*|[\w.~+/-]{16,})")
_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)(?:[^\s/?#'\"]+|[^\s/:@'\"]+:(?!\d+/)[^\s@'\"]*)@")
_QUERY = re.compile(r"([?&;][\w.~%-]*=)((?=[^&;\s'\"#]*[A-Za-z])(?=[^&;\s'\"#]*\d)[\w.~%+/=-]{24,})")
_WEBHOOK = re.compile(
    r"(?i)((?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|[\w.]*webhook\.office\.com|api\.telegram\.org)/)[^\s'\"]+"
)
_FORMS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|(?<![A-Za-z0-9])(?:"
    r"sk-[\w-]{12,}|[sr]k_(?:live|test)_\w{10,}|(?:hf|gsk|r8|rpa|npm|tgp|dop_v1|lin_api)_\w{16,}"
    r"|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|AIza[\w-]{30,}|ya29\.[\w.-]{16,}|eyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?|pypi-[\w-]{16,}|dckr_pat_[\w-]{10,}"
    r"|nvapi-[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}|AGE-SECRET-KEY-\w+|wandb_v\d_\w{16,}"
    r")",
    re.DOTALL,
)


def redacted(text: str) -> str:
    """Return a text in which everything that looks like a key, a password or a signature is replaced by `[secret]`."""
    text = _hidden_values(text, _environment_keys())
    text = _FORMS.sub(HIDDEN, text)
    text = _WEBHOOK.sub(rf"\1{HIDDEN}", text)
    text = _USER.sub(rf"\1{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    text = _SCHEME.sub(rf"\1\2{HIDDEN}", text)
    text = _LOGIN.sub(rf"\1\2{HIDDEN}", text)
    text = _without_values(text)
    return _QUERY.sub(rf"\1{HIDDEN}", text) if "://" in text else text


def redacted_name(name: str) -> str:
    """Return the name of a source without secrets.

    Only a URL is changed. A path on this machine stays the same, because it is needed to find the file again.
    """
    return redacted(name) if "://" in name else name


def redacted_command(words: Sequence[str]) -> list[str]:
    """Return a command line without secrets. The command of --then is reduced to the name of its program."""
    shown, previous_word = [], ""
    for word in words:
        option, equals, value = word.partition("=")
        if previous_word == "--then":
            shown.append(redacted_shell(word))
        elif option == "--then" and equals:
            shown.append(f"--then={redacted_shell(value)}")
        elif (
            previous_word.startswith("-")
            and "=" not in previous_word
            and is_secret(previous_word.lstrip("-"))
            and not HARMLESS.fullmatch(word)
        ):
            shown.append(HIDDEN)
        else:
            shown.append(redacted(word))
        previous_word = word
    return shown


def redacted_shell(command: str) -> str:
    """Return only the program that a shell command runs, because a key may be anywhere in the rest."""
    program, *arguments = command.split() or [""]
    shown = program if re.fullmatch(r"[\w./-]+", program) else HIDDEN
    return redacted(f"{shown} {HIDDEN}" if arguments else shown)


def redacted_json(value: Any) -> Any:
    """Return a JSON value in which all strings, including the keys of objects, are `redacted`."""
    return _in_strings(value, redacted)


def hidden_in(value: Any, key: str) -> Any:
    """Return a server's text or JSON value without the key that was sent to the server.

    The server may repeat the key in any spelling, such as an escaped or an encoded one.
    """
    return _in_strings(value, lambda text: _hidden_values(text, (key,))) if len(key) >= SHORTEST_KEY else value


def is_secret(name: str) -> bool:
    """Return whether the name of an option, setting, variable or query parameter shows that its value is secret."""
    parts = [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]
    if parts[-1:] == ["token"] and not OF_TEXT.isdisjoint(parts[-2:-1]):
        return False
    return bool(parts) and (parts[-1] in WORDS or "".join(parts) in WORDS or not ALWAYS.isdisjoint(parts))


def _without_values(text: str) -> str:
    """Return a text without the values that follow secret names: `name=value`, `name: value` and `--name value`."""
    parts, position = [], 0
    while match := _NAME.search(text, position):
        parts.append(text[position : match.end()])
        position = match.end()
        value = _VALUE.match(text, position)
        if value is not None and _is_secret_pair(match, value[0]):
            quote = value[0][0] if value[0][0] in "'\"" else ""
            parts.append(f"{quote}{HIDDEN}{quote}")
            position = value.end()
    return "".join(parts) + text[position:]


def _is_secret_pair(match: re.Match[str], value: str) -> bool:
    name, separator, option = match.groups()
    if not is_secret(name or option) or HARMLESS.fullmatch(value.strip("'\"")):
        return False
    if separator is None or "=" in separator or value[0] in "'\"":
        return True
    # An unquoted value after a colon is a key if it is long or has a digit; otherwise it is prose, as in
    # "OPENAI_API_KEY: not set".
    return len(value) >= 16 or re.search(r"\d", value) is not None


def _environment_keys() -> tuple[str, ...]:
    """Return the values of this process's secret environment variables, the longest first."""
    values = {
        value.strip()
        for name, value in os.environ.items()
        if is_secret(name) and not HARMLESS.fullmatch(value.strip()) and not value.startswith(("/", "~", "."))
    }
    return tuple(sorted((value for value in values if len(value) >= SHORTEST_KEY), key=len, reverse=True))


def _hidden_values(text: str, values: tuple[str, ...]) -> str:
    for value in values:
        text = _spellings(value).sub(HIDDEN, text)
    return text


@functools.lru_cache(maxsize=64)
def _spellings(value: str) -> re.Pattern[str]:
    r"""Return a regular expression that matches a value in the spellings of JSON, URLs, HTML, base64 and hex.

    JSON may write "/" as `\/` and "+" as `\u002B`. If a JSON string contains JSON, the backslashes of the inner JSON
    are doubled; the expression also matches this.
    """
    backslashes = r"(?:\\(?:u005[cC])?)*"
    characters = []
    for character in value:
        code = ord(character)
        escapes = [
            re.escape(character),
            rf"u(?i:{code:04x})",
            rf"%(?i:{code:02x})",
            rf"&\#0*{code};",
            rf"&\#[xX]0*(?i:{code:x});",
        ]
        characters.append(f"{backslashes}(?:{'|'.join(escapes)})")
    data = value.encode()
    encoded = [data.hex()]
    for shift in range(3):  # base64 encodes groups of three bytes; the value may start at any position in a group
        text = base64.b64encode(bytes(shift) + data).decode().rstrip("=")
        inner = text[-(-shift * 8 // 6) : len(text) - (len(data) + shift) % 3 % 2 - ((len(data) + shift) % 3 > 0)]
        encoded += [inner, inner.replace("+", "-").replace("/", "_")]
    patterns = [f"(?i:{text})" if text == encoded[0] else re.escape(text) for text in encoded]
    return re.compile("|".join(["".join(characters), *patterns]))


def _in_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_in_strings(name, change): _in_strings(item, change) for name, item in value.items()}
    return [_in_strings(item, change) for item in value] if isinstance(value, list) else value
