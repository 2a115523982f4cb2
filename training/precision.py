"""Mixed precision: bf16 or fp16 autocast over fp32 weights, or fp32; fp16 loss scaling."""

from contextlib import AbstractContextManager, nullcontext

import attrs
import torch
from torch import Tensor

from common.checks import integer, number

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

INITIAL_LOSS_SCALE = 2.0**16  # the numbers of torch.amp.GradScaler
SMALLEST_LOSS_SCALE = 1.0  # gradients that overflow below it are not finite in any precision
GROWTH_INTERVAL = 2000  # finite steps before the scale doubles


def resolve(precision: str, device: torch.device) -> str:
    """Return "bf16", "fp16" or "fp32"; "auto" is bf16 on GPUs that compute it, fp16 on others, fp32 on CPUs."""
    if precision != "auto":
        return precision
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, AUTOCAST_DTYPES[precision])


def kept_casts(device: torch.device) -> AbstractContextManager[object]:
    """Keep a CPU's casts of weights for all `autocast` regions inside, where the weights must not change.

    A region forgets its casts when the outermost one ends: this is that one. Not on a GPU, where the copies would take
    2 bytes a parameter in the backward pass, and compiled blocks cast inside.
    """
    return torch.autocast("cpu", enabled=False) if device.type == "cpu" else nullcontext()


@attrs.frozen(kw_only=True)
class SavedLossScale:
    scale: float = attrs.field(validator=number(0.0, above=True))
    finite_steps: int = attrs.field(validator=integer(0))


class LossScale:
    """Loss scale against underflow of fp16 gradients: dynamic under fp16, always 1 otherwise.

    torch.amp.GradScaler looks at each rank's own gradients, which differ under FSDP; this one follows the global
    gradient norm, so that every rank takes the same decision and none waits for the GPU.
    """

    def __init__(self, precision: str, device: torch.device):
        self.dynamic = precision == "fp16"
        self.scale = torch.tensor(INITIAL_LOSS_SCALE if self.dynamic else 1.0, device=device)
        self.finite_steps = torch.tensor(0, dtype=torch.int32, device=device)

    def exhausted(self) -> Tensor:
        """Tell, on the device, whether the scale is so low that gradients overflow in any precision."""
        return self.scale < SMALLEST_LOSS_SCALE

    def update(self, grad_norm: Tensor) -> None:
        """Halve the scale after a step that overflowed; double it after GROWTH_INTERVAL steps that did not."""
        if not self.dynamic:
            return
        finite = torch.isfinite(grad_norm)
        counted = torch.where(finite, self.finite_steps + 1, 0)
        grown = torch.where(counted == GROWTH_INTERVAL, self.scale * 2, self.scale)
        self.scale.copy_(torch.where(finite, grown, self.scale / 2))
        self.finite_steps.copy_(torch.where(counted == GROWTH_INTERVAL, 0, counted))

    def state(self) -> SavedLossScale:
        return SavedLossScale(scale=self.scale.item(), finite_steps=int(self.finite_steps.item()))

    def load(self, state: SavedLossScale, precision: str | None) -> None:
        """Continue from a checkpoint of a precision; a run that changed its own starts with its own scale."""
        if self.dynamic and precision == "fp16":
            self.scale.fill_(state.scale)
            self.finite_steps.fill_(state.finite_steps)


@attrs.frozen(kw_only=True)
class Numerics:
    """Numerical settings of a run, with every "auto" resolved for this machine."""

    determinism: str  # "off", "run" or "elastic"
    precision: str  # "bf16", "fp16" or "fp32"
    compiled: bool | str  # true: block by block; "model": as one graph
