"""What others have published of OpenAI's GPT-2, to be shown beside. None of it has an interval."""

import attrs

from evaluation.commands.hellaswag import PUBLISHED as HELLASWAG
from evaluation.comparison.measures import COMPLETION, HELD_OUT, JUDGED, LM_EVAL

# gpjt's range of its own token set, on which its losses are measured (gpjt/ddp-base-model-from-scratch).
GPJT_RANGE = {"dataset": "gpjt/fineweb-gpt2-tokens", "split": "validation", "start": 50_000_000, "count": 19_660_800}
POST, SCRIPT = 1, 2
SOURCES = {
    POST: "gilesthomas.com, 9 January 2026, part 30: loss on 19,660,800 tokens of FineWeb, score of its own judge",
    SCRIPT: "karpathy/build-nanogpt, hellaswag.py: acc_norm on all 10,042 items of the validation split, by that "
    "script and by lm-eval",
}


@attrs.frozen(kw_only=True)
class Published:
    """One model: for each measure the value as it was printed, and its source."""

    label: str
    values: dict[str, tuple[str, int]]


PUBLISHED = [
    Published(
        label="OpenAI GPT-2 small, published",
        values={
            HELD_OUT: ("3.500", POST),
            JUDGED: ("22.98", POST),
            COMPLETION: (f"{HELLASWAG['completion'][2]:.4f}", SCRIPT),
            LM_EVAL: (f"{HELLASWAG['lm-eval'][2]:.4f}", SCRIPT),
        },
    ),
    Published(label="OpenAI GPT-2 medium, published", values={HELD_OUT: ("3.231", POST), JUDGED: ("38.53", POST)}),
    Published(label="OpenAI GPT-2 XL, published", values={COMPLETION: ("0.4893", SCRIPT), LM_EVAL: ("0.5089", SCRIPT)}),
]
