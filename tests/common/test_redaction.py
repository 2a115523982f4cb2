"""Secrets are hidden in URLs, headers, options, settings and the environment, in any spelling; other text is kept."""

import base64
import json

import pytest

from common.errors import BadInput
from common.other_programs import foreign_keys
from common.output import progress, show
from common.redaction import HIDDEN, hidden_in, is_secret, redacted, redacted_command, redacted_json, redacted_shell
from training.config.train_config import KEY_ROWS

SECRET = "hunter2-Wx9+a"
IN_TEXT = (
    "https://me:{}@host/a.jsonl",
    "https://{}@github.com/owner/name.git",
    "https://host/a.jsonl?X-Amz-Signature={}&X-Amz-Date=2026",
    "https://host/a.jsonl?X-Amz-Security-Token={}",
    "https://host/a.jsonl?sv=2026&sig={}",
    "https://host/a.jsonl?token={}",
    "https://host/a#access_token={}",
    "s3://key:{}@bucket/prefix",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};EndpointSuffix=b",
    "Authorization: Bearer {}",
    "-H 'authorization: basic {}'",
    "X-Api-Key: {}",
    "Cookie: session={}",
    "OPENAI_API_KEY={} python train.py",
    "password={}",
    "--api-key {}",
    "--password={}",
    "curl -u me:{} https://host",
    '{{"client_secret": "{}"}}',
    "https://hooks.slack.com/services/T0/B0/{}",
)
FORMS = (
    "sk-proj-abcdefgh0123",
    "hf_abcdefghijklmnopqrst",
    "ghp_abcdefghijklmnop0123",
    "github_pat_abcdefghijklmnop0123",
    "glpat-abcdefghijklmnop",
    "xoxb-0123456789-abc",
    "AKIAABCDEFGHIJKLMNOP",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----",
)
PLAIN = (
    "hf://datasets/owner/name@0123456789abcdef0123456789abcdef01234567/train.parquet",
    "http://host:8080/files/a@b.jsonl?download=true&part=3",
    "s3://bucket/prefix/train-00001.safetensors",
    "git@github.com:owner/name",
    "--set start_val_token=50000000 --token-files DIR --tokenizer gpt2",
    "runs/x/train.json: unknown key 'warmup_step'; did you mean 'warmup_period_percent'?",
    "OPENAI_API_KEY: not set; set it to your OpenAI API key, or pass --base-url for another server",
    "--set: got 'a', wanted KEY=VALUE",
    "special token: <|end|>",
)


@pytest.mark.parametrize("text", IN_TEXT)
def test_secrets_are_hidden_wherever_people_put_them(text: str) -> None:
    hidden = redacted(text.format(SECRET))
    assert HIDDEN in hidden and "hunter2" not in hidden and "Wx" not in hidden


def test_the_usual_forms_of_keys_are_hidden() -> None:
    for form in FORMS:
        assert redacted(f"it says {form} and more") == f"it says {HIDDEN} and more"


def test_other_text_is_unchanged() -> None:
    for text in PLAIN:
        assert redacted(text) == text


def test_values_of_secret_variables_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "odd value of mine")
    monkeypatch.setenv("MY_SERVICE_NAME", "a name of mine")
    assert redacted("said odd value of mine to a name of mine") == f"said {HIDDEN} to a name of mine"


def test_recorded_commands_contain_no_secrets() -> None:
    words = [
        "train.py",
        "runs/x",
        "--set",
        "learning_rate=1e-3",
        "--then",
        f"curl -d {SECRET} https://host",
        "--steps",
        "5",
    ]
    assert redacted_command(words) == [*words[:5], f"curl {HIDDEN}", *words[6:]]
    assert redacted_command(["a", f"--then=mail -s {SECRET}"]) == ["a", f"--then=mail {HIDDEN}"]
    assert redacted_command(["a", "--api-key", SECRET, "--tokens", "5"]) == ["a", "--api-key", HIDDEN, "--tokens", "5"]
    assert redacted_shell("poweroff") == "poweroff"
    assert redacted_shell(f"KEY={SECRET} run") == f"{HIDDEN} {HIDDEN}"


def test_errors_and_notes_contain_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"https://me:{SECRET}@host/a?sig={SECRET}"
    show(progress(f"NOTE: {url}"))
    assert SECRET not in str(BadInput(f"{url}: cannot be read")) + capsys.readouterr().err
    assert redacted_json({"a": [url, 1]}) == {"a": [f"https://{HIDDEN}@host/a?sig={HIDDEN}", 1]}


def test_a_key_is_hidden_in_any_spelling() -> None:
    key = "sk-proj-/secret+key=0123"
    escaped = "".join(f"\\u{ord(character):04X}" for character in key)
    spellings = [
        key,
        key.replace("/", "\\/"),
        key.replace("+", "\\u002B").replace("/", "\\u002f"),
        escaped,
        json.dumps(json.dumps({"a": key.replace("/", "\\/")})),
        json.dumps(escaped),
        key.replace("+", "\\u005cu002B"),
        key.replace("+", "%2b").replace("/", "%2F").replace("=", "%3D"),
        key.replace("+", "&#43;").replace("/", "&#x2F;"),
        key.encode().hex().upper(),
        *(
            base64.b64encode(f"{before}{key}{after}".encode()).decode()
            for before in ("", "a", "ab")
            for after in ("", "b")
        ),
    ]
    for spelling in spellings:
        hidden = hidden_in(f"wrong key: {spelling}.", key)
        assert HIDDEN in hidden and len(hidden) < 50, spelling
        assert hidden_in({"a": [spelling]}, key) != {"a": [spelling]}


def test_settings_of_a_run_are_not_secret() -> None:
    names = [name for keys in KEY_ROWS.values() for name in keys]
    assert [name for name in [*names, *foreign_keys(KEY_ROWS), "eos_token", "pad_token"] if is_secret(name)] == []
    assert all(is_secret(name) for name in ("token", "HF_TOKEN", "api_token", "access-token", "sessionToken"))
    assert redacted("start_val_token: got 'abc'") == "start_val_token: got 'abc'"
