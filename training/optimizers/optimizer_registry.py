"""Registry of optimizers, by their name in train.json. To add one, write its file and list it here."""

from training.optimizers.adamw import ADAMW
from training.optimizers.muon import MUON
from training.optimizers.update_rule import OptimizerKind

OPTIMIZERS: dict[str, OptimizerKind] = {"adamw": ADAMW, "muon": MUON}
