"""Find a model's tokenizer: the one the user gave, the one in the model's files, or the one that its run recorded."""

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


def tokenizer_of(location: ModelLocation, requested: str | None, config: ModelConfig) -> Tokenizer | None:
    """Return the requested tokenizer, or the tokenizer of the model's tokens if `requested` is None. Raises BadInput.

    Return None if no tokenizer is requested and the model's own is unknown.
    """
    if requested is not None:
        loaded: Tokenizer | None = load_tokenizer(requested)
    else:
        loaded, recorded = read_tokenizer_files(location.path), location.tokenizer
        recorded_identity = None if recorded is None else recorded.identity
        if loaded is not None and recorded_identity is not None and identity(loaded) != recorded_identity:
            problem = f"differs from the tokenizer that {location.run}/{RESOLVED} names for the run's tokens"
            raise BadInput(
                f"{location.path}: its tokenizer {problem}; move its tokenizer files elsewhere, or pass --tokenizer"
            )
        loaded = loaded or _recorded_tokenizer(location, config)
    if loaded and loaded.surrounding_note is not None:
        show(loaded.surrounding_note, once=True)
    # nanoGPT's character-level models have no end-of-text id, but our tokenizer adds one to its vocabulary.
    if loaded and loaded.vocabulary_size - (loaded.characters is not None) > config.vocab_size:
        problem = f"has {loaded.vocabulary_size} ids, but the model in {location.path} has {config.vocab_size}"
        raise BadInput(f"tokenizer {loaded.name}: {problem}; pass the tokenizer of the training data with --tokenizer")
    return loaded


def given_tokenizer(location: ModelLocation, tokenizer: Tokenizer, config: ModelConfig) -> GivenTokenizer | None:
    """Return the record of a tokenizer from --tokenizer, or None if it gives the same ids as the model's own."""
    model_tokenizer, is_same = _own_tokenizer(location, tokenizer, config)
    if is_same:
        return None
    if model_tokenizer is not None:
        show(
            note(
                f"{location.path}: --tokenizer {tokenizer.name} gives different ids from the model's own tokenizer, "
                f"{model_tokenizer}, so the model reads ids that it was not trained on; stored results name the given "
                "tokenizer and are compared separately"
            ),
            once=True,
        )
    return GivenTokenizer(name=tokenizer.name, identity=identity(tokenizer), is_other=model_tokenizer is not None)


def _own_tokenizer(location: ModelLocation, tokenizer: Tokenizer, config: ModelConfig) -> tuple[str | None, bool]:
    """Return the name of the model's own tokenizer, and whether `tokenizer` gives the same ids.

    The name is None if the model does not name a tokenizer. A run's own tokenizer is the one that prepared its tokens,
    even if other tokenizer files are next to the weights. A model that names no tokenizer but has GPT-2's vocabulary
    size is assumed to use GPT-2's tokenizer; the same assumption is made without --tokenizer.
    """
    with suppress(BadInput):  # damaged files are a reason to pass --tokenizer
        if (recorded := location.tokenizer) is not None and location.run is not None:
            has_all = recorded.all_special_tokens.items() <= tokenizer.special_tokens.items()
            return recorded.name, has_all and is_recorded(tokenizer, recorded, location.run)
    with suppress(BadInput):
        model_tokenizer = read_tokenizer_files(location.path)
        if model_tokenizer is None and (vocabulary := _nanogpt_vocabulary(location)) is not None:
            model_tokenizer = load_tokenizer(str(vocabulary))
        if model_tokenizer is not None:
            has_all = model_tokenizer.special_tokens.items() <= tokenizer.special_tokens.items()
            return model_tokenizer.name, has_all and gives_same_ids(model_tokenizer, tokenizer)
    return None, tokenizer.name == "gpt2" and config.vocab_size == GPT2_VOCABULARY_SIZE


def _nanogpt_vocabulary(location: ModelLocation) -> Path | None:
    """Return the path of nanoGPT's meta.pkl next to a run's tokens, or None if there is none."""
    directories = location.job.token_directories
    path = directories[0] / NANOGPT if len(directories) == 1 else None
    return path if path is not None and path.is_file() else None


def _recorded_tokenizer(location: ModelLocation, config: ModelConfig) -> Tokenizer | None:
    """Return the tokenizer of a model without tokenizer files, or None if it is unknown.

    The sources are, in this order, the run's `resolved.json`, nanoGPT's meta.pkl next to the tokens, and the size of
    the vocabulary, which identifies GPT-2's tokenizer.
    """
    if (recorded := location.tokenizer) is not None:
        assert location.run is not None
        loaded = recorded_tokenizer(recorded, location.run)
        sizes, valid_identities = (loaded.vocabulary_size, loaded.end_of_text_id), (None, identity(loaded))
        if (recorded.vocabulary_size, recorded.end_of_text_id) != sizes or recorded.identity not in valid_identities:
            raise BadInput(
                f"{location.run / RESOLVED}: tokenizer {loaded.name} gives different ids on this machine than when the "
                "run's tokens were prepared; install the same version of tiktoken, or pass --tokenizer"
            )
        return loaded
    if (vocabulary := _nanogpt_vocabulary(location)) is not None:
        return load_tokenizer(str(vocabulary))
    if config.vocab_size != GPT2_VOCABULARY_SIZE:
        return None
    line = f"{location.path}: names no tokenizer; gpt2 is assumed, because the model has {config.vocab_size:,} ids"
    show(note(line), once=True)
    return load_tokenizer("gpt2")
