"""In-place edit of the micro-batch in train.json; every other character stays."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from common.errors import BadInput
from common.files import replace_file, write_error
from common.json_files import parse_json, read_regular
from training.config.train_config import TrainConfig

_MICROBATCH = re.compile(r'("(?:micro|mini)batch_size"\s*:\s*)\d+')  # mini: the older spelling


def check_editable(train: TrainConfig, overrides: Sequence[str]) -> None:
    """Raise BadInput where editing the micro-batch would change other settings, or cannot be written."""
    path, file = train.file, train.file.resolve()
    text = read_regular(path).decode()
    keys = parse_json(text)
    if not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)):
        raise BadInput(f"{path}: --write: this file and its folder must be writable; or leave out --write")
    if not _MICROBATCH.search(text):
        raise BadInput(f'{path}: --write: wanted the key spelt "microbatch_size", without escapes')
    if overrides:
        raise BadInput(f"--write: got --set {overrides[0]} as well; put it into {path}, or leave out --write")
    if train.batch.global_batch_size is None:
        raise BadInput(
            f"{path}: --write keeps the global batch, wanted global_batch_size; without it the global batch follows "
            "the micro-batch: set it first"
        )
    for key, reason in (
        ("gradient_accumulation_steps", "it is derived from global_batch_size; leave it out"),
        (
            "validation_batches",
            f'it counts micro-batches; wanted "validation_sequences": {train.validation.validation_sequences}',
        ),
    ):
        if key in keys:
            raise BadInput(f"{path}: --write: got {key} {keys[key]}: {reason}")


def write_microbatch(path: Path, size: int) -> bool:
    """Write the micro-batch into train.json, atomically; return whether that changed it.

    A symbolic link, the file's mode and its line ends are kept. Raises BadInput when it cannot be written.
    """
    file = path.resolve()
    before = read_regular(file).decode()  # not as text, which would lose \r
    keys = parse_json(before)
    after = _MICROBATCH.sub(rf"\g<1>{size}", before)
    assert parse_json(after) == keys | {key: size for key in ("microbatch_size", "minibatch_size") if key in keys}
    if after == before:
        return False
    mode = file.stat().st_mode
    try:
        replace_file(file, after, durable=True)
        file.chmod(mode)
    except OSError as error:
        raise BadInput(f"{write_error(path, error)}, or put microbatch_size {size} there") from error
    return True
