"""Write a new run directory for train.py --like, with the keys of another run or the network of a model.

The new keys fit the token files.
"""

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, refusing
from common.files import is_folder, replace_file, writing
from common.hub_client import HUB, MODEL, hub_name, is_own_export, nearest_folder, note_local
from common.json_files import read_json
from common.launch import environment_world_size, is_first_on_machine
from common.output import Notice, note, show
from common.text import quoted
from model.config import ModelConfig
from tokens.batches.sampling import Layout, window_count
from tokens.format.manifest import has_split, open_listed, read_content
from training.command import TrainCommand
from training.config.batch_plan import derive_layout
from training.config.train_config import KEYS, Run, TrainConfig, is_run, make_run, override, read_files
from training.data.locate_tokens import ROOT
from training.data.open_tokens import TokenSet
from training.data.verify_tokens import check_tokens, tokens_at_hand

RECIPE = Path("runs", "1xrtx3090")  # if --like names a model, train.json is copied from this run
MOST_EPOCHS = 16  # more repeats of the same tokens add next to nothing: Muennighoff et al. 2023, arXiv 2305.16264


def new_run(command: TrainCommand, network: Callable[[str], ModelConfig]) -> Run:
    """Return the new run that --like asks for, and write its directory, except in a dry run or plan.

    `network` takes the name or folder of a model and reads its configuration. Raises BadInput if an argument is wrong,
    or if the directory already has files with other values.
    """
    directory, like, token_files = command.run, command.like or "", command.options.token_files
    writes, model = not (command.dry_run or command.plan), like.startswith(HUB)
    template = RECIPE if model else Path(like)
    source = template if is_folder(template) else ROOT / template
    if not is_folder(source):
        if "/" not in like:
            near = nearest_folder(like, [Path("runs")], is_run)
            suggestion = "" if near is None else f"did you mean {near}? "
            accepted = f"wanted a run directory, such as runs/quickstart, or a model: {HUB}DIR or {HUB}OWNER/NAME"
            raise BadInput(f"--like {like}: no such folder; {suggestion}{accepted}")
        with refusing("--like", kinds=(BadInput,)):
            hub_name(like, MODEL, [Path("runs")], is_run)
        model, template = True, RECIPE
        source = template if is_folder(template) else ROOT / template
    status = "written" if writes else "would be written"
    lines: list[str | Notice] = [f"{directory}: {status}, based on {like}{f' and {RECIPE}' if model else ''}"]
    is_new, values = not (directory / "train.json").exists(), read_files(source)
    if model:
        local = like.removeprefix(HUB)  # hf:DIR means the network of the model in the folder DIR
        if is_folder(Path(local)) and not is_own_export(Path(local)):
            note_local(local, MODEL, f"run `hf download {local} --local-dir DIR`, and write --like {HUB}DIR")
        keys = attrs.asdict(network(local if is_folder(Path(local)) else like))
        values["model"] = {key: value for key, value in keys.items() if value != KEYS["model"][key].default}
    values["train"].pop("checkpoints", None)  # this bucket belongs to the other run
    values["train"] |= {} if token_files is None else {"dataset": str(token_files)}
    overridden = override(command.overrides, values)
    run = make_run(directory, source, values, overridden)
    world_size = command.world_size or max(environment_world_size(), run.train.execution.tensor_parallel)
    train = TrainConfig.from_keys(
        run.train.flat() | {"validation_interval": None}, directory / "train.json", overridden
    )
    token_set = tokens_at_hand(train, None)
    if token_set is None:
        lines.append(
            note(
                "some of the run's tokens are not on this disk, so vocabulary, validation and epochs are not fitted to "
                "them"
            )
        )
    for section, key, value, reason in [] if token_set is None else _fit(run, token_set, world_size, overridden):
        old = values[section].get(key, KEYS[section][key].default)
        if key == "vocab_size" and command.options.init_from is not None and value < old:
            continue  # the vocabulary of a trained model can grow, but cannot shrink
        if key not in overridden and value != old and old is not None and not (model and section == "model"):
            values[section][key] = value
            lines.append(f"{section}.json: {key} {json.dumps(old)} -> {json.dumps(value)}: {reason}")
    run = make_run(directory, directory, values, overridden)
    check_tokens(run, None, world_size)
    for section in KEYS:
        _write(directory / f"{section}.json", values[section], like, writes=writes)
    if is_new:
        show(*lines, once=True)
    return run


def _fit(
    run: Run, token_set: TokenSet, world_size: int, overridden: Collection[str]
) -> Iterator[tuple[str, str, Any, str]]:
    """Yield the settings that suit the tokens: section, key, value, and the reason for the value."""
    options, context = run.train.validation, run.model.context_length
    splits = [(directory.path, "validation", directory.manifest) for directory in token_set.directories]
    validation = next((open_listed(*split) for split in splits if has_split(*split)), None)
    if token_set.tokenizer is not None:
        path, tokenizer = token_set.tokenizer
        yield "model", "vocab_size", tokenizer.vocabulary_size, f"tokenizer {tokenizer.name} of {path}"
    else:
        streams = [*token_set.streams, *([] if validation is None else [validation])]
        largest = max(read_content(file).max_id for stream in streams for file in stream.files)
        yield "model", "vocab_size", max(2, largest + 1), f"the largest id is {largest:,}; the tokenizer is unknown"
    weighted = next((stream for stream in token_set.streams if stream.weighted), None)
    reason = "the tokens have no weights" if weighted is None else f"{weighted.files[0].path.parent} has weights"
    yield "train", "objective", "text" if weighted is None else "answers", reason
    held_out = 0 if validation is None else max(0, validation.length - 1 - options.start_val_token) // context
    if held_out == 0:
        yield "train", "validation_interval", None, f"there are fewer than {context + 1} validation tokens"
    elif held_out < options.validation_sequences:
        reason = f"half of {held_out * context:,} held-out tokens"  # `evaluate.py loss` uses the other half
        yield "train", "validation_sequences", max(1, held_out // 2), reason
    windows = window_count(token_set.streams[0].length, run.train.data.start_train_token, context)
    if windows and isinstance(run.train.data.dataset, str):
        yield from _fit_steps(run.train, windows, derive_layout(run.train, context, world_size), overridden)


def _fit_steps(train: TrainConfig, windows: int, layout: Layout, overridden: Collection[str]) -> Iterator[Any]:
    """Yield a `max_epochs` that is large enough for the run's tokens, but at most MOST_EPOCHS.

    If even that many epochs do not suffice, yield a smaller `min_train_tokens` as well.
    """
    max_epochs, tokens, batch = train.data.max_epochs, train.data.min_train_tokens, layout.global_batch_size
    step_tokens = batch * layout.context_length
    limit = max_epochs if "max_epochs" in overridden else max(max_epochs, MOST_EPOCHS)
    steps = windows * max_epochs // batch if tokens is None else -(-tokens // step_tokens)
    if tokens is not None and steps * batch > limit * windows and "min_train_tokens" not in overridden:
        steps = limit * windows // batch
        reason = f"{limit} epochs of {windows * layout.context_length:,} tokens; more epochs add little"
        yield "train", "min_train_tokens", max(1, steps) * step_tokens, reason
    steps = max(1, steps)
    epochs = -(-steps * batch // windows)
    yield "train", "max_epochs", max(max_epochs, epochs), f"{steps * step_tokens:,} tokens take {epochs} epochs"


def _write(path: Path, values: dict[str, Any], like: str, *, writes: bool) -> None:
    """Write a file unless it exists already. Only one rank of each machine writes it.

    Raises BadInput if the file exists and has other values.
    """
    if writes and is_first_on_machine():
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(values, indent=4) + "\n", durable=True, keep_existing=True)
    stored = read_json(path) if path.exists() else values
    for key in {**stored, **values}:
        if stored.get(key, attrs.NOTHING) != values.get(key, attrs.NOTHING):
            stored_text, new_text = (quoted(keys[key]) if key in keys else "absent" for keys in (stored, values))
            raise BadInput(
                f"{path}: already exists, and its {key} is {stored_text}, but --like {like} would write {new_text}; "
                "leave out --like to train the existing run, or name a new RUN"
            )
