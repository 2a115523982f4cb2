"""Identity of the weights that a result was measured on: by their content, never by the name of a checkpoint alone.

A stored result has two hashes. `weights_sha256` is of the values in fp32, ordered by name: equal in a checkpoint, in a
copy of it, and in an export in fp32. `weights_file_sha256` is of the files, and is what a reader compares: a checkpoint
of ours has it in its manifest, so that no model is loaded.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from training.telemetry.metrics_log import WEIGHTS_FILE, WEIGHTS_VALUES

SHOWN_DIGITS = 12  # of a hash, in messages


@attrs.frozen(kw_only=True)
class WeightsIdentity:
    values_sha256: str | None = None
    files_sha256: str | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "WeightsIdentity | None":
        """Return the identity that a stored record carries; None where it carries none: its weights are unknown."""
        values, files = (
            value if isinstance(value := record.get(key), str) else None for key in (WEIGHTS_VALUES, WEIGHTS_FILE)
        )
        return None if values is None and files is None else cls(values_sha256=values, files_sha256=files)

    def as_record(self) -> dict[str, str]:
        """Return the hashes by the keys of a stored record."""
        known = {WEIGHTS_VALUES: self.values_sha256, WEIGHTS_FILE: self.files_sha256}
        return {key: value for key, value in known.items() if value is not None}

    def is_same(self, other: "WeightsIdentity | None") -> bool | None:
        """Tell whether these are the same weights; None where no hash of one kind is known of both."""
        pairs = [] if other is None else zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        known = [one == two for one, two in pairs if one is not None and two is not None]
        return any(known) if known else None

    def __str__(self) -> str:
        return (self.values_sha256 or self.files_sha256 or "")[:SHOWN_DIGITS]
