"""Names that the hub would refuse are refused before an upload. An error of the hub's client is printed in one line."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import BadInput
from common.hub_client import DATASET, MODEL, check_names, explained, hub_name, note_local


class HubError(Exception):
    """Resembles an error of the hub's client."""

    def __init__(self, status: int, server_message: str | None = None):
        super().__init__("client\nerror")
        self.response = SimpleNamespace(status_code=status)
        self.server_message = server_message


def test_names_and_licenses_follow_the_hubs_rules() -> None:
    check_names("owner/name-1.0", None)
    check_names("owner/name", "cc-by-4.0")
    for name in ("name", "owner/", "a/b/c", "owner/näme", "-a/b"):
        with pytest.raises(BadInput, match="not a repository name; wanted OWNER/NAME"):
            check_names(name, None)
    with pytest.raises(BadInput, match="--license: got 'M I T', wanted a license of the hub"):
        check_names("owner/name", "M I T")


def test_errors_explain_what_to_do() -> None:
    assert (
        explained(HubError(500)) == "the hub answers with status 500; rerun the same command to resume (client error)"
    )
    raised = "access is refused, status 403; run `hf auth login` with a token that may write to it (no)"
    assert explained(HubError(403, "no")) == raised
    assert (
        explained(HubError(401), "read")
        == "access is refused, status 401; check the name, or run `hf auth login` with a token that may read it "
        "(client error)"
    )
    wrapped = RuntimeError("Error while uploading")
    wrapped.__cause__ = HubError(500, "\x1b[2J" + "x" * 1000)
    assert (
        explained(wrapped) == "the hub answers with status 500; rerun the same command to resume"
    )  # the original message is too long


def test_offline_mode_is_named_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert explained(ConnectionError("check your connection")) == "HF_HUB_OFFLINE is set: unset it to reach the hub"
    assert explained(HubError(403, "no")).startswith("access is refused, status 403; run `hf auth login`")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "quickstart",
            "quickstart: no such directory; did you mean runs/quickstart? for a model on the hub, write hf:quick",
        ),
        ("runs/quikstart", "did you mean runs/quickstart?"),
        ("run/quickstart", "did you mean runs/quickstart?"),
        ("runs/other", "runs/other: no such directory; for a model on the hub, write hf:runs/other"),
        ("runs/quickstart/checkpoint", "no such directory; did you mean runs/quickstart/checkpoints?"),
        ("a b", "a b: no such directory; wanted a model directory, or OWNER/NAME on the hub"),
    ],
)
def test_a_similar_local_name_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, message: str
) -> None:
    (tmp_path / "runs" / "quickstart" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "gpt2").mkdir()  # a folder with results of a hub model
    monkeypatch.chdir(tmp_path)

    def ask(name: str) -> str:
        return hub_name(name, MODEL, [Path("runs")], lambda path: path.name != "gpt2")

    with pytest.raises(BadInput) as raised:
        ask(reference)
    assert message in str(raised.value)
    assert (ask("hf:quickstart"), ask("gpt2"), ask("hf:owner/name"), ask("owner/quickstart")) == (
        *("quickstart", "gpt2", "owner/name", "owner/quickstart"),
    )
    with pytest.raises(BadInput, match="wanted a dataset directory, or OWNER/NAME on the hub"):
        hub_name("name", DATASET, [], os.path.isdir)


def test_failed_downloads_explain_the_cause() -> None:
    class DryRunError(OSError):
        pass

    download_error = DryRunError("Dry run cannot be performed as the repository cannot be accessed.")
    for cause, message in (
        (ConnectionError("connection refused"), "no connection; rerun the same command to resume (connection refused)"),
        (HubError(404, "Repository not found"), "not found; check the name (Repository not found)"),
        (
            HubError(401),
            "access is refused, status 401; check the name, or run `hf auth login` with a token that may read it "
            "(client error)",
        ),
    ):
        download_error.__cause__ = cause
        assert explained(download_error, "read") == message


def test_errors_of_a_failing_hub_advise_a_rerun() -> None:
    class BadRequestError(HubError, ValueError):
        pass

    for status in (400, 429, 500, 503):
        message = explained(BadRequestError(status, "Out of order"))
        assert message == f"the hub answers with status {status}; rerun the same command to resume (Out of order)"
    assert explained(ValueError("impossible")) == "the request was not accepted; check the name (impossible)"


def test_ambiguous_local_names_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    note_local.cache_clear()
    for _ in range(2):
        note_local("openai-community/gpt2", MODEL)
    note_local("owner/words", DATASET)
    for local_path in ("runs/quickstart", "token_files/quickstart", "./owner/words", "/tmp/x", "a/b/c", "words"):
        note_local(local_path, DATASET)
    assert capsys.readouterr().err.splitlines() == [
        "NOTE: openai-community/gpt2: using the local path of this name; for a model on the hub, write "
        "hf:openai-community/gpt2",
        "NOTE: owner/words: using the local path of this name; for a dataset on the hub, write hf:owner/words",
    ]


def test_hub_client_messages_are_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwx")
    for words in ("token hf_abcdefghijklmnopqrstuvwx is wrong", "x" * 200, ""):
        assert explained(OSError(words), advice=", or wait") == (
            "the transfer failed with OSError; rerun the same command to resume, or wait"
        )
    several = ValueError("Config name is missing.\nPlease pick one among the available configs: ['small', 'large']")
    assert explained(several) == "choose one of its configurations, as in hf:OWNER/NAME:CONFIG: small, large"
