"""train.py with one more optimizer, registered in one line: sign descent on a bf16 momentum."""

import sys
from typing import Any

import torch
from torch import nn

from training.config.key_groups import OPTIMIZERS, OptimizationOptions
from training.optimizers.update_rule import Placement, Shape, StateTensor, UpdateRule


class SignDescent(torch.optim.Optimizer):
    """Moves each weight by the learning rate, against the sign of its momentum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["momentum"].lerp_(parameter.grad.to(torch.bfloat16), 0.1)
                state["updates"] += 1
                warm = (state["updates"][0] / 4).clamp(max=1.0).item()  # state of another shape matters as well
                parameter.sub_(state["momentum"].sign(), alpha=warm * group["lr"])


def _state(shape: Shape) -> dict[str, StateTensor]:
    return {"momentum": StateTensor(shape, torch.bfloat16), "updates": StateTensor((3,), torch.int32)}


def _build(parameters: dict[str, nn.Parameter], options: OptimizationOptions, _: Placement) -> torch.optim.Optimizer:
    return SignDescent(list(parameters.values()), {"lr": options.learning_rate})


RULES = (UpdateRule(state=_state, build=_build),)

if __name__ == "__main__":
    import train

    OPTIMIZERS["sign"], sys.modules["training.optimizers.sign"] = "sign descent", sys.modules["__main__"]
    sys.argv[0] = "train.py"
    train.leave(train.main())
