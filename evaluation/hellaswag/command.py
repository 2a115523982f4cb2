"""Options of evaluate.py hellaswag."""

from typing import Annotated

import attrs

from common.arguments import option
from common.checks import integer
from evaluation.shared.command_line import MeasureOptions


@attrs.frozen(kw_only=True)
class HellaSwagCommand(MeasureOptions):
    """Accuracy on HellaSwag, by the convention of build-nanogpt and llm.c."""

    data: Annotated[
        str,
        option("hellaswag_val.jsonl, or a dataset on the hub, whose validation split is used", "FILE|OWNER/NAME"),
    ] = "Rowan/hellaswag"
    count: Annotated[int | None, option("number of items, from the first; default: all", "N", check=integer(1))] = None
