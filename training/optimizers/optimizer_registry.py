"""Registry of optimizers: the values of `optimizer` in train.json. To add one: its file, and its line here."""

from training.optimizers.adamw import ADAMW
from training.optimizers.muon import MUON
from training.optimizers.update_rule import OptimizerKind

OPTIMIZERS: dict[str, OptimizerKind] = {"adamw": ADAMW, "muon": MUON}
