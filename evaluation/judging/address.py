"""Address of a judge's server: URL, user and password, and API key."""

import ipaddress
import os
from urllib.parse import unquote, urlsplit

from common.errors import BadInput

OPENAI_URL = "https://api.openai.com/v1"
SHORTEST_SECRET = 8  # characters; shorter placeholders, such as EMPTY, may be words of a verdict
Credentials = tuple[str, str] | None  # user and password


def split_credentials(url: str) -> tuple[str, Credentials]:
    """Return a URL without its user and password, and these: the URL is printed and stored, they are not.

    Raises BadInput if it is no http:// address, or, without quoting it, if it is unclear which part is the password.
    """
    if not url.startswith(("http://", "https://")):
        shown = url.rpartition("@")[2]
        raise BadInput(f"--base-url: got '{shown}', wanted http:// or https://, as http://localhost:8000/v1")
    try:
        parts = urlsplit(url)
        clear = parts.port is None or parts.port > 0
    except ValueError:
        clear = False
    if not clear or "@" in parts.path + parts.query + parts.fragment:
        raise BadInput(
            "--base-url: not a URL, or its user or password holds a reserved character; it is not shown here: "
            "percent-encode such characters, / as %2F, @ as %40, # as %23, ? as %3F, : as %3A"
        )
    if "@" not in parts.netloc:
        return url, None
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return plain, (unquote(parts.username or ""), unquote(parts.password or ""))


def find_key(base_url: str, credentials: Credentials = None) -> str | None:
    """Return the environment's API key. Raises BadInput without one for OpenAI, or if a secret would be exposed."""
    key = os.environ.get("OPENAI_API_KEY", "").strip() or None
    if key is not None and not all("!" <= character <= "~" for character in key):
        raise BadInput(
            "OPENAI_API_KEY: holds a space, a line end or a non-ASCII character, which no key has; it is not shown "
            "here: set it to the key alone"
        )
    if key is None and base_url == OPENAI_URL:
        raise BadInput("OPENAI_API_KEY: not set; set it to a key of the provider, or pass --base-url of another server")
    url = urlsplit(base_url)
    if url.scheme == "http" and not _is_loopback(url.hostname or ""):
        advice = "would cross the network unencrypted; use https://, or an SSH tunnel to localhost"
        if credentials is not None:
            raise BadInput(f"{base_url}: the password {advice}")
        if len(key or "") >= SHORTEST_SECRET:
            raise BadInput(f"{base_url}: OPENAI_API_KEY {advice}, or unset it if this server needs no key")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
