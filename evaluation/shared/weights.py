"""The identity of the weights that a result was measured on: it depends on their content, not on a checkpoint's name.

A stored result has two hashes. `weights_sha256` is the hash of the values in fp32, ordered by name; it is the same for
a checkpoint, a copy of it, and an export in fp32. `weights_file_sha256` is the hash of the files. Results are matched
by the second hash. No model has to be loaded for this, because the manifest of a Lockstep checkpoint contains the hash.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from training.telemetry.metrics_log import WEIGHTS_FILE, WEIGHTS_VALUES

SHOWN_DIGITS = 12  # digits of a hash that messages show


@attrs.frozen(kw_only=True)
class WeightsIdentity:
    """The known hashes of a model's weights."""

    values_sha256: str | None = None
    files_sha256: str | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "WeightsIdentity | None":
        """Return the identity in a stored record. Return None if the record has no hash: its weights are unknown."""
        values, files = (
            value if isinstance(value := record.get(key), str) else None for key in (WEIGHTS_VALUES, WEIGHTS_FILE)
        )
        return None if values is None and files is None else cls(values_sha256=values, files_sha256=files)

    def as_record(self) -> dict[str, str]:
        """Return the hashes, with the keys that a stored record has for them."""
        hashes = {WEIGHTS_VALUES: self.values_sha256, WEIGHTS_FILE: self.files_sha256}
        return {key: value for key, value in hashes.items() if value is not None}

    def is_same(self, identity: "WeightsIdentity | None") -> bool | None:
        """Return whether both identities belong to the same weights, or None if they have no kind of hash in common."""
        pairs = [] if identity is None else zip(attrs.astuple(self), attrs.astuple(identity), strict=True)
        equal = [ours == theirs for ours, theirs in pairs if ours is not None and theirs is not None]
        return any(equal) if equal else None

    def __str__(self) -> str:
        return (self.values_sha256 or self.files_sha256 or "")[:SHOWN_DIGITS]
