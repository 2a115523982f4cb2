"""The tokenizer that --tokenizer gave for a measurement, as stored results name it. Importing this is quick: no torch.

A model under another tokenizer than its own reads other ids than it was trained on. Such a result is no result of the
model, so readers keep it apart from the others.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from training.telemetry.metrics_log import GIVEN_TOKENIZER


@attrs.frozen(kw_only=True)
class GivenTokenizer:
    """A tokenizer that was given, and is not known to be the model's own."""

    name: str
    identity: str  # of the ids that it gives to texts
    is_other: bool  # than the model's own; False: the model names none

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "GivenTokenizer | None":
        """Return the tokenizer that a stored record names; None if it was the model's own. Raises ValueError."""
        value = record.get(GIVEN_TOKENIZER)
        if value is None:
            return None
        fields = {"name": str, "identity": str, "is_other": bool}
        if not isinstance(value, dict) or any(type(value.get(key)) is not kind for key, kind in fields.items()):
            raise ValueError(f"{GIVEN_TOKENIZER}: wanted an object with {', '.join(fields)}")
        return cls(**{key: value[key] for key in fields})

    def as_record(self) -> dict[str, Any]:
        return attrs.asdict(self)
