"""The list of whole messages: every entry is compared, and a reworded message is noticed."""

import ast
import json
from collections import Counter

from tests.conftest import ROOT
from tests.messages import MESSAGES, messages_by_test, normalized


def test_every_listed_test_and_module_exists() -> None:
    functions: dict[str, set[str]] = {}
    for test in messages_by_test():
        file, function = test.partition("[")[0].split("::")
        if file not in functions:
            nodes = ast.walk(ast.parse((ROOT / file).read_text()))
            functions[file] = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert function in functions[file], test
    assert all((ROOT / module).is_file() for module in json.loads(MESSAGES.read_text()))


def test_each_message_is_listed_once() -> None:
    texts = [message["text"] for messages in json.loads(MESSAGES.read_text()).values() for message in messages]
    assert len(texts) > 500 and max(Counter(texts).values()) == 1


def test_folders_and_ports_do_not_matter() -> None:
    line = "train.py: /tmp/pytest-of-me/pytest-7/popen-gw0/test_a0/run/model.json: at http://127.0.0.1:4321/v1"
    assert normalized(line) == "TMP/run/model.json: at http://127.0.0.1:PORT/v1"
    assert normalized(f"{ROOT}/runs/a: x") == "ROOT/runs/a: x"
