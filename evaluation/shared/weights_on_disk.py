"""Hash a loaded network and the files of a directory, to recognize the weights of a stored result."""

import hashlib
from pathlib import Path

from common.files import sha256
from evaluation.shared.foreign import model_files
from evaluation.shared.weights import WeightsIdentity
from model.gpt import GPT
from training.checkpoints.directory import MANIFEST
from training.checkpoints.initial_weights import weights_sha256
from training.checkpoints.lookup import checkpoint_titled
from training.checkpoints.saved_state import weights_digest


def identity_of(network: GPT, directory: Path) -> WeightsIdentity:
    """Return the identity of a network that was loaded from a directory.

    Call this before the network's layout is changed for generation.
    """
    return WeightsIdentity(values_sha256=weights_sha256(network), files_sha256=files_sha256(directory))


def files_sha256(directory: Path) -> str | None:
    """Return the hash of a checkpoint's weights, or of the weights and configuration of another program's model.

    Returns None if the directory contains no model, or if its files cannot be read.
    """
    if (directory / MANIFEST).is_file():
        return weights_digest(directory)
    try:
        digests = [(path.name, sha256(path)) for path in model_files(directory)]
    except OSError:  # for example, because a file that is listed in an index is missing
        return None
    return hashlib.sha256(repr(digests).encode()).hexdigest() if digests else None


def identity_on_disk(home: Path, title: str) -> WeightsIdentity | None:
    """Return the identity of the weights that a result's title now refers to, or None if they are not on this disk.

    `home`: the directory of the results. `title`: the title in the results, as `ModelLocation.title` returned it.
    """
    checkpoint = checkpoint_titled(home, title)
    digest = files_sha256(checkpoint if checkpoint.is_dir() else home)
    return None if digest is None else WeightsIdentity(files_sha256=digest)
