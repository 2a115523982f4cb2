"""Tokenizer of a model: the one that is given, that of its files, or the one that its run has recorded."""

from contextlib import suppress
from pathlib import Path

from common.errors import BadInput
from common.output import note, show
from evaluation.shared.given_tokenizer import GivenTokenizer
from evaluation.shared.model_location import ModelLocation
from model.config import ModelConfig
from tokens.tokenizer.hugging_face_files import read_tokenizer_files
from tokens.tokenizer.loading import (
    NANOGPT,
    gives_same_ids,
    identity,
    is_recorded,
    load_tokenizer,
    recorded_tokenizer,
)
from tokens.tokenizer.tokenizer import Tokenizer
from training.checkpoints.run_record import RESOLVED

GPT2_VOCABULARY_SIZE = 50_257


def tokenizer_of(place: ModelLocation, wanted: str | None, config: ModelConfig) -> Tokenizer | None:
    """Return the wanted tokenizer, or that of a model's tokens, None where it is unknown. Raises BadInput."""
    if wanted is not None:
        loaded: Tokenizer | None = load_tokenizer(wanted)
    else:
        loaded, recorded = read_tokenizer_files(place.path), place.tokenizer
        known = None if recorded is None else recorded.identity
        if loaded is not None and known is not None and identity(loaded) != known:
            problem = f"differs from the tokenizer that {place.run}/{RESOLVED} names for the run's tokens"
            raise BadInput(f"{place.path}: its tokenizer {problem}; move its files away, or pass --tokenizer")
        loaded = loaded or _recorded_tokenizer(place, config)
    if loaded and loaded.surrounding_note is not None:
        show(loaded.surrounding_note, once=True)
    # nanoGPT's models lack an id for the end of text
    if loaded and loaded.vocabulary_size - (loaded.characters is not None) > config.vocab_size:
        problem = f"got {loaded.vocabulary_size} ids, but the model of {place.path} has {config.vocab_size}"
        raise BadInput(f"tokenizer {loaded.name}: {problem}; pass the tokenizer of its tokens with --tokenizer")
    return loaded


def given_tokenizer(place: ModelLocation, tokenizer: Tokenizer, config: ModelConfig) -> GivenTokenizer | None:
    """Return a tokenizer of --tokenizer as results name it; None if it gives the ids of the model's own."""
    own, is_same = _own_tokenizer(place, tokenizer, config)
    if is_same:
        return None
    given = GivenTokenizer(name=tokenizer.name, identity=identity(tokenizer), is_other=own is not None)
    if own is not None:
        show(
            note(
                f"{place.path}: --tokenizer {tokenizer.name} gives other ids than its own tokenizer, {own}, so the "
                "model reads other ids than it was trained on; stored results name that tokenizer and are compared "
                "apart"
            ),
            once=True,
        )
    return given


def _own_tokenizer(place: ModelLocation, tokenizer: Tokenizer, config: ModelConfig) -> tuple[str | None, bool]:
    """Return the name of a model's own tokenizer, None where it names none, and whether another gives the same ids.

    The tokenizer of a run's tokens is its own, whatever other files lie beside the weights. A model of GPT-2's size
    that names none is taken for one of GPT-2's tokens, as without --tokenizer.
    """
    with suppress(BadInput):  # of damaged files, which are a reason to pass --tokenizer
        if (recorded := place.tokenizer) is not None and place.run is not None:
            has_all = recorded.all_special_tokens.items() <= tokenizer.special_tokens.items()
            return recorded.name, has_all and is_recorded(tokenizer, recorded, place.run)
    with suppress(BadInput):
        own = read_tokenizer_files(place.path)
        if own is None and (vocabulary := _nanogpt_vocabulary(place)) is not None:
            own = load_tokenizer(str(vocabulary))
        if own is not None:
            has_all = own.special_tokens.items() <= tokenizer.special_tokens.items()
            return own.name, has_all and gives_same_ids(own, tokenizer)
    return None, tokenizer.name == "gpt2" and config.vocab_size == GPT2_VOCABULARY_SIZE


def _nanogpt_vocabulary(place: ModelLocation) -> Path | None:
    """Return nanoGPT's meta.pkl beside a run's tokens, or None."""
    directories = place.job.token_directories
    path = directories[0] / NANOGPT if len(directories) == 1 else None
    return path if path is not None and path.is_file() else None


def _recorded_tokenizer(place: ModelLocation, config: ModelConfig) -> Tokenizer | None:
    """Return the tokenizer of `resolved.json`, of nanoGPT's meta.pkl beside the tokens, gpt2 by its size, or None."""
    if (recorded := place.tokenizer) is not None:
        assert place.run is not None
        loaded = recorded_tokenizer(recorded, place.run)
        sizes, known = (loaded.vocabulary_size, loaded.end_of_text_id), (None, identity(loaded))
        if (recorded.vocabulary_size, recorded.end_of_text_id) != sizes or recorded.identity not in known:
            raise BadInput(
                f"{place.run / RESOLVED}: tokenizer {loaded.name} gives other ids here than the run's tokens have; "
                "install the version of tiktoken that prepared them, or pass --tokenizer"
            )
        return loaded
    if (vocabulary := _nanogpt_vocabulary(place)) is not None:
        return load_tokenizer(str(vocabulary))
    if config.vocab_size != GPT2_VOCABULARY_SIZE:
        return None
    line = f"{place.path}: names no tokenizer; with {config.vocab_size:,} ids it is taken for gpt2's"
    show(note(line), once=True)
    return load_tokenizer("gpt2")
