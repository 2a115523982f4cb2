"""Names that the hub would refuse are refused before an upload, and errors of its client are one line."""

from types import SimpleNamespace

import pytest

from common.errors import BadInput
from common.hub_client import DETAIL_CHARACTERS, check_names, explained


class HubError(Exception):
    """An error as the hub's client raises it."""

    def __init__(self, status: int, server_message: str | None = None):
        super().__init__("client\nerror")
        self.response = SimpleNamespace(status_code=status)
        self.server_message = server_message


def test_names_and_licenses_are_those_of_the_hub() -> None:
    check_names("owner/name-1.0", None)
    check_names("owner/name", "cc-by-4.0")
    for name in ("name", "owner/", "a/b/c", "owner/näme", "-a/b"):
        with pytest.raises(BadInput, match="not a repository name; wanted OWNER/NAME"):
            check_names(name, None)
    with pytest.raises(BadInput, match="--license: got 'M I T', wanted a license of the hub"):
        check_names("owner/name", "M I T")


def test_an_error_is_explained_by_what_to_do() -> None:
    assert explained(HubError(500)) == "client error; rerun the same command to resume"
    assert explained(HubError(403, "no")) == "no; run `hf auth login` with a token that may write to it"
    assert (
        explained(HubError(401), "read")
        == "client error; check the name, or run `hf auth login` with a token that may read it"
    )
    wrapped = RuntimeError("Error while uploading")
    wrapped.__cause__ = HubError(500, "\x1b[2J" + "x" * 1000)
    text = explained(wrapped)
    assert text.startswith("\\x1b[2Jxx") and text.index(";") == DETAIL_CHARACTERS


def test_without_the_network_by_choice_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert explained(ConnectionError("check your connection")) == "HF_HUB_OFFLINE is set: unset it to reach the hub"
    assert explained(HubError(403, "no")).startswith("no; run `hf auth login`")
