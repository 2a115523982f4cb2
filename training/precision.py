"""Precision: plain fp32, or fp32 weights with autocast to bf16 or fp16. With fp16, the loss is scaled."""

from contextlib import AbstractContextManager, nullcontext

import attrs
import torch
from torch import Tensor

from common.checks import integer, number

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

INITIAL_LOSS_SCALE = 2.0**16  # this value and GROWTH_INTERVAL are the defaults of torch.amp.GradScaler
SMALLEST_LOSS_SCALE = 1.0  # gradients that overflow even below this scale are not finite in any precision
GROWTH_INTERVAL = 2000  # number of finite steps before the scale doubles


def resolve(precision: str, device: torch.device) -> str:
    """Return "bf16", "fp16" or "fp32".

    "auto" means bf16 on GPUs that compute it in hardware, fp16 on other GPUs, and fp32 on CPUs.
    """
    if precision != "auto":
        return precision
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which the network is computed in this precision."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, AUTOCAST_DTYPES[precision])


def cached_casts(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a CPU casts each weight only once. The weights must not change inside it.

    torch keeps the cast weights of an `autocast` region until the outermost region ends; this context is that outermost
    region. It does nothing on a GPU, where the copies would occupy 2 bytes per parameter during the backward pass, and
    where compiled blocks cast the weights inside their kernels.
    """
    return torch.autocast("cpu", enabled=False) if device.type == "cpu" else nullcontext()


@attrs.frozen(kw_only=True)
class SavedLossScale:
    scale: float = attrs.field(validator=number(0.0, above=True))
    finite_steps: int = attrs.field(validator=integer(0))


class LossScale:
    """Loss scale that prevents fp16 gradients from underflowing. It is dynamic under fp16, and otherwise always 1.

    torch.amp.GradScaler looks at the gradients of one rank, which differ between ranks under FSDP. This loss scale
    depends on the global gradient norm instead, so that every rank makes the same decision and no rank waits for its
    GPU.
    """

    def __init__(self, precision: str, device: torch.device):
        self.dynamic = precision == "fp16"
        self.scale = torch.tensor(INITIAL_LOSS_SCALE if self.dynamic else 1.0, device=device)
        self.finite_steps = torch.tensor(0, dtype=torch.int32, device=device)

    def exhausted(self) -> Tensor:
        """Return whether the scale is so low that gradients would overflow in every precision.

        The result is a bool on the device.
        """
        return self.scale < SMALLEST_LOSS_SCALE

    def update(self, grad_norm: Tensor) -> None:
        """Halve the scale after a step that overflowed; double it after GROWTH_INTERVAL finite steps in a row."""
        if not self.dynamic:
            return
        finite = torch.isfinite(grad_norm)
        finite_steps = torch.where(finite, self.finite_steps + 1, 0)
        scale = torch.where(finite_steps == GROWTH_INTERVAL, self.scale * 2, self.scale)
        self.scale.copy_(torch.where(finite, scale, self.scale / 2))
        self.finite_steps.copy_(torch.where(finite_steps == GROWTH_INTERVAL, 0, finite_steps))

    def state(self) -> SavedLossScale:
        return SavedLossScale(scale=self.scale.item(), finite_steps=int(self.finite_steps.item()))

    def load(self, state: SavedLossScale, precision: str | None) -> None:
        """Continue from a checkpoint that was trained in `precision`.

        A run that has changed its precision to fp16 since then starts with the initial scale.
        """
        if self.dynamic and precision == "fp16":
            self.scale.fill_(state.scale)
            self.finite_steps.fill_(state.finite_steps)


@attrs.frozen(kw_only=True)
class Numerics:
    """Numerical settings of a run, with every "auto" resolved for this machine."""

    determinism: str  # "off", "run" or "elastic"
    precision: str  # "bf16", "fp16" or "fp32"
    compiled: bool | str  # True: compiled block by block; "model": compiled as one graph
