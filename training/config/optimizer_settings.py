"""Optimizer settings of train.json: those without effect, and the optimizer in words."""

import json
from collections.abc import Iterator

import attrs

from training.config.key_groups import OptimizationOptions
from training.optimizers.optimizer_registry import OPTIMIZERS


def muon_problems(options: OptimizationOptions) -> Iterator[str]:
    """Yield, as "KEY: got ..., wanted ...", settings of Muon that have no effect."""
    for name, field in attrs.fields_dict(OptimizationOptions).items():
        value = getattr(options, name)
        if name.startswith("muon_") and options.optimizer != "muon" and value != field.default:
            yield (
                f"{name}: got {json.dumps(value)}, wanted {json.dumps(field.default)}, because optimizer is "
                f'"{options.optimizer}"; leave it out, or set optimizer to muon'
            )
    if options.muon_first_momentum is not None and options.muon_momentum_warmup_steps == 0:
        yield (
            f"muon_first_momentum: got {options.muon_first_momentum:g}, wanted null, or muon_momentum_warmup_steps "
            "above 0: without warm-up the momentum is muon_momentum from the first step on"
        )


def describe_optimizer(options: OptimizationOptions) -> str:
    """Return the optimizer in words, with the settings that are its own."""
    words = OPTIMIZERS[options.optimizer].title
    if options.optimizer == "muon":
        muon = options.muon
        words += "; queries, keys and values apart" if muon.split_qkv else ""
        rising = f"{muon.first_momentum:g} to " if muon.warmup_steps else ""
        words += f"; momentum {rising}{muon.momentum:g}"
        words += f" in {muon.warmup_steps:,} steps" if muon.warmup_steps else ""
    return words
