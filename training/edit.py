"""The micro-batch in a train.json, changed in place: every other character stays."""

import json
import re

from errors import BadInput
from files import replace_file
from training.config import Run


def check_editable(run: Run, overrides: list[str]) -> None:
    """Raise BadInput where another micro-batch in train.json would change more than the micro-batch."""
    path = run.directory / "train.json"
    keys = json.loads(path.read_text())
    if overrides:
        raise BadInput(f"--write: got --set {overrides[0]} as well; put it into {path}, or leave out --write")
    if run.train.global_batch_size is None:
        raise BadInput(
            f"{path}: --write keeps the global batch, wanted global_batch_size; without it the global batch follows "
            "the micro-batch: set it first"
        )
    for key, reason in (
        ("gradient_accumulation_steps", "it is derived from global_batch_size; leave it out"),
        (
            "validation_batches",
            f'it counts micro-batches; wanted "validation_sequences": {run.train.validation_sequences}',
        ),
    ):
        if key in keys:
            raise BadInput(f"{path}: --write: got {key} {keys[key]}: {reason}")


def write_microbatch(run: Run, size: int) -> bool:
    """Put the micro-batch into train.json, all of it or on an error none; return whether it was another one before."""
    path = run.directory / "train.json"
    before = path.read_text(encoding="utf-8")
    keys = json.loads(before)
    after = re.sub(r'("(?:micro|mini)batch_size"\s*:\s*)\d+', rf"\g<1>{size}", before)  # mini: the older spelling
    assert json.loads(after) == keys | {key: size for key in ("microbatch_size", "minibatch_size") if key in keys}
    if after != before:
        replace_file(path, after, durable=True)
    return after != before
