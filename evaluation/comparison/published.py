"""What others have published of OpenAI's GPT-2, to be shown beside. None of it has an interval.

A loss is shown only beside losses of the same tokens: nats a token of another tokenizer or text are another quantity.
"""

import attrs

from evaluation.comparison.measures import COMPLETION, HELD_OUT, JUDGED, LM_EVAL, Cell, Result
from evaluation.hellaswag.command import PUBLISHED as HELLASWAG

# gpjt's range of its own token set, on which its losses are measured (gpjt/ddp-base-model-from-scratch).
GPJT_RANGE = {"dataset": "gpjt/fineweb-gpt2-tokens", "split": "validation", "start": 50_000_000, "count": 19_660_800}
POST, SCRIPT = 1, 2
SOURCES = {
    POST: "gilesthomas.com, 9 January 2026, part 30: loss on 19,660,800 tokens of FineWeb; score of another judge, in "
    "another session",
    SCRIPT: "karpathy/build-nanogpt, hellaswag.py: acc_norm on all 10,042 items of the validation split, by that "
    "script and by lm-eval",
}


NOT_COMPARED = "Published values have no interval: no model is called better or worse than them."
OTHER_TEXT = (
    "Published losses of OpenAI's GPT-2 are left out: they are nats a GPT-2 token of FineWeb, and here another text or "
    "tokenizer is measured."
)


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


def published_rows(columns: list[str], losses: list[Result]) -> tuple[list[list[Cell]], list[str]]:
    """Return the rows of published models that have a value in some column, and notes. `losses`: those in the table."""
    same_text = bool(losses) and all(
        result["range"].get(key) == value for result in losses for key, value in GPJT_RANGE.items()
    )
    rows, used = [], set()
    for model in PUBLISHED:
        values = {
            name: entry for name, entry in model.values.items() if name in columns and (same_text or name != HELD_OUT)
        }
        if values:
            cells = {name: Cell(text=f"{text} [{source}]") for name, (text, source) in values.items()}
            rows.append([Cell(text=model.label), *(cells.get(name, Cell(text="")) for name in columns[1:])])
            used |= {source for _, source in values.values()}
    notes = [f"[{source}] {SOURCES[source]}" for source in sorted(used)]
    notes += [OTHER_TEXT] if losses and not same_text else []
    return rows, [*notes, NOT_COMPARED] if rows else notes
