"""New run directory: the keys of another one, or the network of a model, fitted to token files (train.py --like)."""

import json
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import attrs

from common.errors import LARGEST_INTEGER, BadInput, printable, quoted
from common.files import is_folder, replace_file, writing
from common.json_files import read_json
from model.config import ModelConfig
from tokens.format.manifest import has_split, open_listed, read_content
from tokens.format.token_file import TokenStream
from training.checkpoints.directory import checkpoints_of
from training.command import TrainCommand
from training.config.batch_plan import derive_layout, make_plan
from training.config.train_config import KEYS, Run, make_run, override, read_files
from training.data.locate_tokens import ROOT
from training.data.open_tokens import TokenSet
from training.data.verify_tokens import check_tokens, tokens_at_hand
from training.launch import environment_rank, environment_world_size

MODEL = "hf:"  # begins the name of a model
RECIPE = Path("runs", "1xrtx3090")  # of which a model gets train.json
MOST_EPOCHS = 16  # more repeats of the same tokens add next to nothing: Muennighoff et al. 2023, arXiv 2305.16264
LOSSES = 4  # validations and checkpoints of a run that is shorter than its intervals
POLL_SECONDS = 0.5


class NewRun:
    """Keys of a run directory that is to be written, and the changes that fit them to its tokens."""

    def __init__(self, directory: Path, source: Path, values: dict[str, dict[str, Any]], chosen: Collection[str]):
        """`source`: directory of the keys; `chosen`: those of --set, which nothing changes."""
        self.directory, self.source, self.values, self.chosen = directory, source, values, chosen
        self.run = make_run(directory, source, values, chosen)
        self.changes: list[str] = []  # a line each

    def change(self, section: str, key: str, value: Any, why: str) -> None:
        """Set a key, unless --set has."""
        old = self.values[section].get(key, KEYS[section][key].default)
        if key not in self.chosen and value != old:
            self.values[section][key] = value
            self.changes.append(f"{section}.json: {key} {json.dumps(old)} -> {json.dumps(value)}: {why}")
            self.run = make_run(self.directory, self.source, self.values, self.chosen)


def new_run(command: TrainCommand, network: Callable[[str], ModelConfig]) -> Run:
    """Return the run of --like, its directory written but with --dry-run or --plan. Call it on every rank.

    `network`: reads the configuration of a model. Raises BadInput, also where the directory holds another run.
    """
    directory, like, given = command.run, command.like or "", command.options.token_files
    writes, model = not (command.dry_run or command.plan), like.startswith(MODEL)
    named = RECIPE if model else Path(like)
    source = named if is_folder(named) else ROOT / named
    if not is_folder(source):
        wanted = f"a run directory, such as runs/quickstart, or {MODEL}DIR or {MODEL}OWNER/NAME of a model"
        raise BadInput(f"--like {like}: no such directory; wanted {wanted}")
    if is_folder(directory) and directory.samefile(source):
        raise BadInput(f"--like {like}: is the run directory itself; leave --like out, or name a new RUN")
    begins = not (directory / "train.json").exists()
    values = read_files(source)
    if model:
        values["model"] = _network_keys(directory, like.removeprefix(MODEL), network, waits=writes)
    values["train"].pop("checkpoints", None)  # the bucket of another run
    values["train"] |= {} if given is None else {"dataset": str(given)}
    chosen = override(command.overrides, values)
    values["train"] |= {"dataset": _portable(values["train"].get("dataset"))}
    new = NewRun(directory, source, values, chosen)
    _fit(new, command.world_size or environment_world_size(), vocabulary=not model)
    for section in KEYS:
        _write(directory / f"{section}.json", new.values[section], like, writes=writes)
    if begins and environment_rank() == 0:
        of = f"{like}, train.json like {RECIPE}" if model else like
        lines = [f"{directory}: {'written' if writes else 'not written'}, like {of}", *new.changes]
        print("\n".join(map(printable, lines)), flush=True)
    return make_run(directory, directory, new.values, ())


def _network_keys(directory: Path, name: str, network: Callable[[str], ModelConfig], *, waits: bool) -> dict[str, Any]:
    """Return a model's keys of model.json; one rank of a machine reads the model, the others what it has written."""
    path, reads = directory / "model.json", os.environ.get("LOCAL_RANK", "0") == "0"
    while waits and not reads and not path.exists():
        time.sleep(POLL_SECONDS)
    if path.exists() and (not reads or is_folder(checkpoints_of(directory))):
        return dict(read_json(path))
    defaults = {key: field.default for key, field in KEYS["model"].items()}
    return {key: value for key, value in attrs.asdict(network(name)).items() if value != defaults[key]}


def _portable(dataset: Any) -> Any:
    """Return a value of `dataset` with absolute paths for those that lead elsewhere from another folder than this."""
    if isinstance(dataset, list):
        return [
            part | {"dataset": _portable(part.get("dataset"))} if isinstance(part, dict) else part for part in dataset
        ]
    here = Path(dataset) if isinstance(dataset, str) else ROOT
    if not is_folder(here) or (is_folder(ROOT / here) and here.samefile(ROOT / here)):
        return dataset
    return str(here.absolute())


def _fit(new: NewRun, world_size: int, *, vocabulary: bool) -> None:
    """Change keys so that the tokens at hand suffice. Raises BadInput where they cannot, or --set forbids it."""
    token_set = tokens_at_hand(new.run.train.replace(validation_interval=None), None)
    if token_set is None:
        new.changes.append("the tokens are not all here yet: nothing is fitted to them")
        return
    validation = next(
        (
            open_listed(each.path, "validation", each.manifest)
            for each in token_set.directories
            if has_split(each.path, "validation", each.manifest)
        ),
        None,
    )
    if vocabulary:
        _fit_vocabulary(new, token_set, [*token_set.streams, *([] if validation is None else [validation])])
    _fit_epochs(new, token_set, world_size)
    context, options = new.run.model.context_length, new.run.train.validation
    if options.validation_interval is not None:
        windows = 0 if validation is None else max(0, validation.length - 1 - options.start_val_token) // context
        if validation is None or windows == 0:
            new.change("train", "validation_interval", None, f"fewer than {context + 1} validation tokens are here")
        elif windows < options.validation_sequences:
            new.change("train", "validation_sequences", windows, f"all of {validation.length:,} validation tokens")
    check_tokens(new.run, None, world_size)
    steps = make_plan(new.run.train, context, world_size, token_set.lengths).steps
    for key in ("validation_interval", "checkpoint_interval"):
        if (new.run.train.flat()[key] or 0) > max(1, steps // LOSSES):
            new.change("train", key, max(1, steps // LOSSES), f"of {steps:,} steps")


def _fit_vocabulary(new: NewRun, token_set: TokenSet, streams: list[TokenStream]) -> None:
    if token_set.tokenizer is not None:
        path, tokenizer = token_set.tokenizer
        new.change("model", "vocab_size", tokenizer.vocabulary_size, f"tokenizer {tokenizer.name} of {path}")
    else:
        largest = max(read_content(file).max_id for stream in streams for file in stream.files)
        new.change("model", "vocab_size", max(2, largest + 1), f"the largest id is {largest:,}, no tokenizer is named")


def _fit_epochs(new: NewRun, token_set: TokenSet, world_size: int) -> None:
    """Raise max_epochs as far as needed, up to MOST_EPOCHS; beyond, lower min_train_tokens to whole steps."""
    train, context = new.run.train, new.run.model.context_length
    most, tokens = train.data.max_epochs, train.data.min_train_tokens
    step = derive_layout(train, context, world_size).global_batch_size * context

    def epochs(tokens: int) -> int:
        """Return how often a run of so many tokens reads the dataset that it repeats most."""
        endless = train.replace(min_train_tokens=tokens, max_epochs=LARGEST_INTEGER)
        sources = make_plan(endless, context, world_size, token_set.lengths).sources
        return max(-(-source.sequences // source.windows) for source in sources if source.windows)

    needed, limit = epochs(tokens or step), most if "max_epochs" in new.chosen else max(most, MOST_EPOCHS)
    if tokens is not None and needed > limit:
        fewer = max(step, tokens * limit // needed // step * step)
        new.change("train", "min_train_tokens", fewer, f"{limit} epochs of what is here; more repeats add little")
        needed = epochs(new.run.train.data.min_train_tokens or step)
    if needed > most:
        new.change("train", "max_epochs", needed, f"{new.run.train.data.min_train_tokens or step:,} tokens are so many")


def _write(path: Path, values: dict[str, Any], like: str, *, writes: bool) -> None:
    """Write a file that is not there; one rank of a machine does. Raises BadInput where it has other keys."""
    if writes and os.environ.get("LOCAL_RANK", "0") == "0":
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(values, indent=4) + "\n", durable=True, keep=True)
    there = read_json(path) if path.exists() else values
    for key in [key for key in {**there, **values} if there.get(key, attrs.NOTHING) != values.get(key, attrs.NOTHING)]:
        got, wanted = (quoted(each[key]) if key in each else "absent" for each in (there, values))
        raise BadInput(
            f"{path}: is there, and {key} in it is {got}, not {wanted} as --like {like} would write it; leave --like "
            "out to train what is there, or name a new RUN"
        )
