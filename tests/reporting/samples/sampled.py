"""Artificial samples for tests of pages."""

from typing import Any

from reporting.samples.sample_log import CheckpointSample, HeldOutText, Said

TEXT = "café <b>\n & x"


def sample(step: int, nats: float, text: str = TEXT, **changes: Any) -> CheckpointSample:
    """Return the sample of a step. The model gives each byte of the text the same probability."""
    content = text.encode()
    held_out = HeldOutText(
        source="tokens: validation", ids=list(content), tokens=[chr(byte) for byte in content], window=8
    )
    values: dict[str, Any] = {
        "step": step,
        "name": f"step-{step:08d}",
        "weights_sha256": f"{step}",
        "starts": 1,
        "said": [Said(prompt="Once <i>", temperature=temperature, text=f"</dd>{step}") for temperature in (0, 1)],
        "held_out": held_out,
        "log_probabilities": [-nats] * (len(content) - 1),
    }
    return CheckpointSample(**(values | changes))
