"""A version of train.py that registers another optimizer in one line: sign descent, with its momentum in bf16."""

import sys
from typing import Any

import torch
from torch import nn

from training.config.key_groups import OPTIMIZERS, OptimizationOptions
from training.optimizers.update_rule import Placement, UpdateRule


class SignDescent(torch.optim.Optimizer):
    """Moves each weight by the learning rate, against the sign of its momentum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["momentum"].lerp_(parameter.grad.to(torch.bfloat16), 0.1)
                parameter.sub_(state["momentum"].sign(), alpha=group["lr"])


def _build(parameters: dict[str, nn.Parameter], options: OptimizationOptions, _: Placement) -> torch.optim.Optimizer:
    return SignDescent(list(parameters.values()), {"lr": options.learning_rate})


RULES = (UpdateRule(state={"momentum": torch.bfloat16}, build=_build),)

if __name__ == "__main__":
    import train

    OPTIMIZERS["sign"], sys.modules["training.optimizers.sign"] = "sign descent", sys.modules["__main__"]
    sys.argv[0] = "train.py"
    train.leave(train.main())
