"""The record of the emulated GPUs: its format matches the driver's. Without the driver, the error says what to do."""

import re

import pytest

from common.errors import BadInput
from tests.conftest import ROOT
from tests.fakegpu.recorder import Entry, Kind, record


def test_kinds_and_fields_match_the_driver() -> None:
    header = (ROOT / "tests" / "fakegpu" / "record.h").read_text()
    kinds = re.sub(r"//.*", "", re.search(r"enum EventKind \{(.*?)\};", header, re.DOTALL)[1])
    assert [kind.name for kind in Kind] == [name.strip() for name in kinds.split(",")]
    fields = re.sub(r"//.*", "", re.search(r"typedef struct \{(.*?)\} Event;", header, re.DOTALL)[1])
    assert [name for name, _ in Entry._fields_] == re.findall(r"(\w+)(?:\[3\])?[,;]", fields)


def test_without_the_driver_the_error_has_advice() -> None:
    with pytest.raises(BadInput, match="there is no emulated GPU; put tests/fakegpu/run before the command"), record():
        pass
