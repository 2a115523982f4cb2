"""Token files as other programs write them."""

from pathlib import Path

import numpy as np

LLM_C = {2: (20240520, 1), 4: (20240801, 7)}  # magic number and version, by the bytes of a token


def write_llm_c(path: Path, tokens: np.ndarray) -> None:
    """Write a shard of llm.c: version 1 of uint16, version 7 of uint32."""
    header = np.zeros(256, "<i4")
    header[:3] = (*LLM_C[tokens.itemsize], len(tokens))
    path.write_bytes(header.tobytes() + tokens.tobytes())


def write_nanogpt(path: Path, tokens: np.ndarray) -> None:
    path.write_bytes(tokens.astype("<u2").tobytes())
