"""Loading of a model and its tokenizer from a run, a checkpoint, a model directory, or the Hugging Face hub."""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file

from common.checks import structured
from common.errors import BadInput, refusing
from common.hub_client import MODEL, download_snapshot, hub_name, is_own_export, note_local
from common.json_files import read_json
from common.output import note, show
from evaluation.shared.chat_template import GENERATION, end_ids, read_template
from evaluation.shared.foreign import check_foreign, load_foreign, with_parameters
from evaluation.shared.given_tokenizer import GivenTokenizer
from evaluation.shared.model_files import CONFIG_FILES, INDEX
from evaluation.shared.model_files import NANOGPT as NANOGPT_MODEL
from model.config import ModelConfig
from model.gpt import GPT
from tokens.format.manifest import TokenizerRecord
from tokens.tokenizer.hugging_face_files import ADDED, CHAT_TEMPLATE, SPECIAL, VOCABULARY, read_tokenizer_files
from tokens.tokenizer.loading import (
    NANOGPT,
    gives_same_ids,
    identity,
    is_recorded,
    load_tokenizer,
    recorded_tokenizer,
)
from tokens.tokenizer.template import ASSISTANT, Message, Template
from tokens.tokenizer.tokenizer import Tokenizer
from training.checkpoints.directory import CHECKPOINTS, MANIFEST, STATE, WEIGHTS
from training.checkpoints.lookup import find_to_evaluate
from training.checkpoints.run_record import RESOLVED
from training.checkpoints.saved_state import read_state, verify
from training.parallel.process_group import Ranks, together

GPT2_VOCABULARY_SIZE = 50_257
RUNS = Path("runs")
HUB_FILES = [*CONFIG_FILES, INDEX, VOCABULARY, SPECIAL, ADDED, CHAT_TEMPLATE, GENERATION]
HUB_FILES += ["*.safetensors", "tokenizer*.json"]


@attrs.frozen
class ModelLocation:
    path: Path  # checkpoint or model directory
    run: Path | None  # its run directory
    home: Path  # directory of its results: the run, the model directory, or for a model of the hub one in runs/

    @property
    def is_own(self) -> bool:
        """True for a checkpoint of ours, with a record of its training; for a damaged one, too."""
        marks = (STATE,) if self.run is None else (STATE, MANIFEST)
        return any(os.path.lexists(self.path / file) for file in marks)

    @property
    def title(self) -> str:
        """Its name for people: of a run, the names of run and checkpoint."""
        name = self.home.resolve().name
        return name.replace("--", "/") if self.run is None else f"{name} {self.path.resolve().name}"

    @property
    def record(self) -> dict[str, Any]:
        """Content of the run's `resolved.json`, or {} where there is none."""
        file = None if self.run is None else self.run / RESOLVED
        return read_json(file) if file is not None and file.exists() else {}

    @property
    def tokenizer(self) -> TokenizerRecord | None:
        """The tokenizer of the run's tokens, where it is known. Raises BadInput."""
        if (entry := self.record.get("tokenizer")) is None:
            return None
        with refusing(f"{self.run}/{RESOLVED}: tokenizer"):
            return structured(entry, TokenizerRecord, unknown_keys=True)


@attrs.frozen
class Trained:
    """A model ready for inference, in fp32 on its device."""

    network: GPT
    known_tokenizer: Tokenizer | None
    place: ModelLocation
    # By --tokenizer, unless it gives the ids of the model's own
    given_tokenizer: GivenTokenizer | None = attrs.field(default=None, kw_only=True)

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises BadInput where none is known."""
        if self.known_tokenizer is None:
            raise BadInput(
                f"{self.place.path}: does not name the tokenizer of its tokens; put nanoGPT's meta.pkl beside them, or "
                "pass it with --tokenizer to evaluate.py: gpt2, bytes, or a file of ranks or characters"
            )
        return self.known_tokenizer

    @cached_property
    def template(self) -> Template | None:
        """The template of conversations; None: it continues plain text.

        Raises BadInput, also for a run whose template would ask for answers with another prompt than it trained them
        after. For a model of others the prompt is what its files say, since we do not know how it was trained.
        """
        recorded = self.place.tokenizer
        if recorded is None or recorded.template is None:
            return read_template(self.place.path)
        template = Template(recorded.template)
        with refusing(
            f"{self.place.run}/{RESOLVED}",
            "train it on tokens that are prepared with the corrected template",
            (BadInput,),
        ):
            template.check()
        return template

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer: those that its files name, of a turn, of a text. Raises BadInput."""
        ends = end_ids(self.place.path) | {self.tokenizer.end_of_text_id}
        return ends if self.template is None else ends.union(self.template.ends(self.tokenizer))

    @property
    def begin_id(self) -> int:
        """The id before a text: the end of the one before, or 0 where the network has no such id."""
        end = self.tokenizer.end_of_text_id
        return end if end < self.network.config.vocab_size else 0

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a prompt; an empty one is `begin_id`."""
        return self.tokenizer.encode(prompt).tolist() or [self.begin_id]

    def ask(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids by which the model is asked for the next message of a conversation.

        They are those of its template. Without one, they are the messages as one text to continue, in which a line end
        follows each answer.
        """
        if self.template is not None:
            return self.template.prompt(self.tokenizer, messages)
        return self.encode("".join(content + "\n" * (role == ASSISTANT) for role, content in messages))

    def spell(self, token: int) -> bytes:
        """Return the bytes of an id, special tokens spelled; none for an id beyond the tokenizer's vocabulary."""
        return self.tokenizer.spell(token) if token < self.tokenizer.vocabulary_size else b""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; broken UTF-8 becomes U+FFFD."""
        return b"".join(map(self.spell, ids)).decode(errors="replace")


def locate(reference: str, name: str | None) -> ModelLocation:
    """Find a model: a directory, or OWNER/NAME on the hub. `name`: checkpoint of a run, else best. Raises BadInput."""
    home = home_of(reference)
    path = Path(reference)
    if not path.exists():
        absent = "no such directory, and no model available on the hub"
        path = Path(download_snapshot(_hub_name(reference), "model", HUB_FILES, absent))
    run = path if _is_run(path) else None
    if run is not None:
        path = find_to_evaluate(run / CHECKPOINTS, name)
    elif name is not None:
        raise BadInput(f"{path}: --checkpoint {name} applies to a run directory, which this is not")
    elif (inside := _run_of(path)) is not None:
        path = inside / CHECKPOINTS / path.resolve().name
        run = home = inside
    place = ModelLocation(path, run, home)
    if place.is_own:
        if problem := verify(path):
            raise BadInput(f"{problem}; choose another checkpoint")
    else:
        check_foreign(path, run)
    return place


def home_of(reference: str) -> Path:
    """Return the directory of a model's results, which may not exist yet. Raises BadInput for an impossible name."""
    path = Path(reference)
    with refusing(f"{reference}: cannot be read", kinds=(OSError,)):
        is_folder = path.is_dir()
    if is_folder:
        is_ours = _is_run(path) or _run_of(path) is not None or is_own_export(path)
        if not is_ours:
            note_local(reference, MODEL)
        return _run_of(path) or path
    return path if path.exists() else RUNS / _hub_name(reference).replace("/", "--")


def is_model(path: Path) -> bool:
    """Tell whether a folder is a run or a model, not only the place of the results of a model of the hub."""
    return any((path / name).exists() for name in (CHECKPOINTS, "train.json", WEIGHTS, NANOGPT_MODEL, *CONFIG_FILES))


def _is_run(path: Path) -> bool:
    return (path / CHECKPOINTS).is_dir() or (path / "train.json").is_file()


def _hub_name(reference: str) -> str:
    return hub_name(reference, MODEL, [RUNS], is_model)


def load(place: ModelLocation, tokenizer: str | None, device: torch.device) -> Trained:
    """Load a model. `tokenizer` overrides its own. Raises BadInput naming what is damaged."""
    network = load_network(place)
    known = tokenizer_of(place, tokenizer, network.config)
    given = None if tokenizer is None or known is None else given_tokenizer(place, known, network.config)
    return Trained(network.to(device).eval(), known, place, given_tokenizer=given)


def load_network(place: ModelLocation) -> GPT:
    """Load a model without its tokenizer, onto the CPU. Raises BadInput naming what is damaged."""
    if not place.is_own:
        return load_foreign(place.path, place.run)
    with refusing(place.path / STATE):
        config = read_state(place.path).config.network_config()
    with refusing(place.path / WEIGHTS, kinds=(OSError, ValueError)):  # deleted a moment ago, for one
        return with_parameters(config, load_file(place.path / WEIGHTS))


def load_on_all(ranks: Ranks, place: ModelLocation, tokenizer: str | None) -> Trained:
    loaded: list[Trained] = []
    together(ranks, lambda: loaded.append(load(place, tokenizer, ranks.device)))  # the value itself is not sent
    return loaded[0]


def _run_of(checkpoint: Path) -> Path | None:
    """Return the run directory of a checkpoint in one; `checkpoints` there may be a link."""
    places = (Path(os.path.abspath(checkpoint)), checkpoint.resolve())  # noqa: PTH100  # no link is followed
    return next((place.parents[1].resolve() for place in places if place.parent.name == CHECKPOINTS), None)


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
    directory = place.record.get("token_files")
    path = Path(directory, NANOGPT) if isinstance(directory, str) else None
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
