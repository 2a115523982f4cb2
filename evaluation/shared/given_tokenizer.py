"""What stored results record about a tokenizer that was given with --tokenizer.

With a tokenizer other than its own, a model reads ids that it was not trained on. Such a result says nothing about the
model itself, so it is kept apart from the model's other results. Importing this module is fast because it does not
import torch.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from training.telemetry.metrics_log import GIVEN_TOKENIZER


@attrs.frozen(kw_only=True)
class GivenTokenizer:
    """A tokenizer that was given with --tokenizer and is not known to be the model's own."""

    name: str
    identity: str  # the same for all tokenizers that give every text the same ids
    is_other: bool  # True: it differs from the model's own; False: the model does not name a tokenizer

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "GivenTokenizer | None":
        """Return the tokenizer that a stored record names, or None if it was the model's own. Raises ValueError."""
        value = record.get(GIVEN_TOKENIZER)
        if value is None:
            return None
        fields = {"name": str, "identity": str, "is_other": bool}
        if not isinstance(value, dict) or any(type(value.get(key)) is not kind for key, kind in fields.items()):
            raise ValueError(f"{GIVEN_TOKENIZER}: wanted an object with {', '.join(fields)}")
        return cls(**{key: value[key] for key in fields})

    def as_record(self) -> dict[str, Any]:
        return attrs.asdict(self)
