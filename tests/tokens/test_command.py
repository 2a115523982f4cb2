"""Command lines of prepare_data.py: preparations and commands, and options that exclude each other."""

from pathlib import Path

import pytest

from common.errors import UsageError
from tokens.command import PushCommand, StatsCommand, VerifyCommand, read_command_line
from tokens.prepare.command import PrepareCommand


def test_a_source_may_have_the_name_of_a_command() -> None:
    for words in (["./stats", "--output", "x"], ["a.txt", "stats", "--output", "x"], ["--output", "x", "stats"]):
        _, command = read_command_line(words)
        assert isinstance(command, PrepareCommand) and command.sources[-1] in ("./stats", "stats")
    assert read_command_line(["stats", "DIR"])[1] == StatsCommand("DIR")


def test_every_option_is_parsed() -> None:
    line = "a b --output s3://x/y --shard-tokens=9 --scratch here --test-fraction 0.5 --on-bad-document fail"
    _, command = read_command_line([*line.split(), "--executor", "ray", "--ray-address", "auto"])
    assert isinstance(command, PrepareCommand)
    assert (command.sources, command.output, command.scratch) == (("a", "b"), "s3://x/y", Path("here"))
    assert (command.shard_tokens, command.test_fraction, command.validation_fraction) == (9, 0.5, 0.01)
    assert (command.tokenizer, command.text_field) == ("gpt2", "text")
    assert (command.split, command.unit_bytes) == ("hash", 1 << 24)
    assert read_command_line(["verify", "s3://x"])[1] == VerifyCommand("s3://x")
    assert read_command_line(["push", "d", "me/it", "--private"])[1] == PushCommand("d", "me/it", private=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "--output is missing: token directory"),
        (["a", "--output", "x", "--validation-fraction", "0.5", "--test-fraction", "0.5"], "their sum must be below 1"),
        (["a", "--output", "ftp://x/y"], "wanted a folder, or s3://, gs:// or az://BUCKET/PREFIX"),
        (["a", "--output", "s3://key:secret@a/b"], "wanted a folder, or s3://, gs:// or az://BUCKET/PREFIX"),
        (["a", "--output", "gs://x", "--shard-tokens", "2000000000"], "with N at most 1,250,000,000"),
        (["a", "--output", "s3://x"], "a bucket needs --shard-tokens N"),
        (["a", "--output", "s3://x", "--shard-tokens", "9", "--split", "tail"], "a bucket needs --split hash"),
        (["a", "--output", "x", "--scratch", "y"], "--scratch: only for an --output in a bucket"),
        (["stats", "--output", "x"], "'stats' is a command and takes no --output; to prepare a source of that name"),
        (["verify", "--outp=x"], "'verify' is a command and takes no --output"),
        (["status", "a", "--output", "x"], "to run the command, write prepare_data.py status DIR"),
        (["stats", "s3://x"], "s3://x: this command reads only local folders; copy the files into one first"),
        (["verfy", "x"], "'verfy': unknown command; did you mean 'verify'?"),
        (["push", "x"], "push: OWNER/NAME is missing: "),
        (["stats", "x", "--end-of-text", "4294967296"], "at most 4,294,967,295"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_command_line(words)
    assert message in str(raised.value) and str(raised.value).isprintable()
