"""What turns gradients into updates: AdamW, or Muon for the matrices of the blocks and AdamW for all else.

AdamW (Loshchilov and Hutter 2019) is fused on GPUs. Muon (Jordan 2024) makes a matrix's momentum nearly orthogonal by
five Newton-Schulz steps in bf16. Its update gets the size of AdamW's (Liu et al., arXiv 2502.16982), so that one
learning rate and one weight decay serve both. Either decays matrices only.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.config.key_groups import OptimizationOptions

ADAMW_MOMENTS, MUON_MOMENTS = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)  # torch's names


class Optimizer:
    """Updates all parameters of a network.

    `moments` has the state that travels in checkpoints, by torch's name of the moment and the parameter's name.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: OptimizationOptions, device: torch.device):
        matrices = _block_matrices(parameters) if config.optimizer == "muon" else {}
        others = {name: parameter for name, parameter in parameters.items() if name not in matrices}
        self.moments: dict[str, dict[str, Tensor]] = {}
        self._adamw = _make_adamw(others, config, device)
        self.parts: tuple[torch.optim.Optimizer, ...] = (self._adamw,)
        self._begin(self._adamw, others, ADAMW_MOMENTS)
        for state in self._adamw.state.values():
            state["step"] = torch.zeros((), device=device if self._adamw.defaults["fused"] else "cpu")
        if matrices:
            self.parts += (_make_muon(matrices, config),)
            self._begin(self.parts[1], matrices, MUON_MOMENTS)

    def set_learning_rate(self, rate: float) -> None:
        """Make the next update one of this learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate

    def step(self, held: Tensor) -> None:
        """Apply the gradients; where the scalar `held` is 1.0 nothing changes, neither moments nor step counts."""
        if len(self.parts) == 1 and self._adamw.defaults["fused"]:
            self._adamw.found_inf = held  # type: ignore[attr-defined]  # the fused kernel's own switch
            self._adamw.step()
        elif not held.item():  # on a CPU nothing waits; Muon has no switch, so with it the host waits for the GPU here
            for part in self.parts:
                part.step()

    @property
    def steps(self) -> int:
        """Updates that were applied; fewer than the run's steps where some were held back. Waits for the GPU."""
        return int(next(iter(self._adamw.state.values()))["step"].item())

    @steps.setter
    def steps(self, count: int) -> None:
        for state in self._adamw.state.values():
            state["step"].fill_(count)

    def _begin(
        self, part: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], moments: tuple[str, ...]
    ) -> None:
        """Begin the state that torch begins at the first update: a checkpoint is read, or written, before that."""
        for moment in moments:
            self.moments[moment] = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
            for name, parameter in parameters.items():
                part.state[parameter][moment] = self.moments[moment][name]


def _block_matrices(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return those that Muon takes: weights inside the blocks, no embedding, no output head."""
    return {
        name: parameter for name, parameter in parameters.items() if name.startswith("blocks.") and parameter.dim() == 2
    }


def _make_adamw(
    parameters: dict[str, nn.Parameter], config: OptimizationOptions, device: torch.device
) -> torch.optim.AdamW:
    """Return AdamW. Biases and LayerNorm gains, which have one dimension, do not decay."""
    decayed = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
    others = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    # On a CPU one tensor after the other stays in the cache: the bits of foreach in about half of its time. FSDP's
    # shards are dispatched in Python, which costs more than that.
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
    kernel = {"fused": True} if device.type == "cuda" else {"foreach": sharded}
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2), **kernel)


def _make_muon(matrices: dict[str, nn.Parameter], config: OptimizationOptions) -> torch.optim.Muon:
    return torch.optim.Muon(
        list(matrices.values()),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
