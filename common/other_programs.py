"""A table of other programs' options with their counterparts in Lockstep. Usage errors quote it.

The programs are gpjt/ddp-base-model-from-scratch, nanoGPT, nanochat, Levanter, and Hugging Face's Trainer with its
example scripts. The names that they use for our keys are in the rows of the keys. docs/other-programs.md shows the
table and these names.
"""

import json
from contextlib import suppress
from typing import NamedTuple

from common.checks import KeyRows


class Meaning(NamedTuple):
    """Options of other programs, and the command that does the same in Lockstep."""

    foreign_names: str  # without leading dashes, with underscores for hyphens, separated by spaces
    command: str
    note: str = ""
    scripts: tuple[str, ...] = ()  # scripts, possibly with a command, to which the row applies; empty: all


TRAINING = ("train.py", "find_batch_size.py")
EVALUATION, PREPARATION = ("evaluate.py",), ("prepare_data.py",)
GENERATION = ("evaluate.py sample", "evaluate.py chat")
# For an option, the first row that has the option's name and applies to the script is used.
OPTIONS = (
    # Generation: nanoGPT's sample.py, nanochat's chat_cli, Hugging Face's run_generation.
    Meaning("start p", "python evaluate.py sample MODEL --prompt TEXT", scripts=("evaluate.py sample",)),
    Meaning("p", "python evaluate.py chat MODEL --prompt TEXT", scripts=("evaluate.py chat",)),
    Meaning("num_samples num_return_sequences", "python evaluate.py sample MODEL --samples N", scripts=EVALUATION),
    Meaning(
        "max_new_tokens max_tokens max_gen_toks length",
        "python evaluate.py sample MODEL --tokens N",
        scripts=EVALUATION,
    ),
    Meaning("t", "python evaluate.py sample MODEL --temperature T", scripts=GENERATION),
    Meaning("k", "python evaluate.py sample MODEL --top-k K", scripts=GENERATION),
    Meaning("s step model_step", "python evaluate.py sample MODEL --checkpoint NAME", scripts=EVALUATION),
    Meaning(
        "out_dir output_dir init_from model_name_or_path pretrained model_tag g source i hf_path",
        "python evaluate.py sample MODEL",
        "MODEL is a run, a checkpoint, a model directory, or OWNER/NAME on the hub",
        EVALUATION,
    ),
    Meaning("max_per_task limit", "python evaluate.py core MODEL --count N", scripts=EVALUATION),
    # Preparation of tokens.
    Meaning("num_proc preprocessing_num_workers", "python prepare_data.py SOURCE --output DIR --workers N"),
    Meaning(
        "vocab_size", "python prepare_data.py tokenizer SOURCE --vocab-size N", "then --tokenizer FILE", PREPARATION
    ),
    Meaning("shard_size", "python prepare_data.py SOURCE --output DIR --shard-tokens N", scripts=PREPARATION),
    Meaning(
        "dataset_name dataset_config_name train_file data_dir data_path data.id data.train_urls",
        "python prepare_data.py SOURCE --output DIR",
        "SOURCE is a file, a folder, or hf:OWNER/NAME; to train on DIR, use --token-files DIR",
    ),
    Meaning(
        "validation_file validation_split_percentage data.validation_urls",
        "python prepare_data.py SOURCE --output DIR --validation-fraction F",
        "the validation set is split off when tokens are prepared",
    ),
    Meaning("tokenizer_name data.tokenizer", "python prepare_data.py SOURCE --output DIR --tokenizer FILE"),
    # Trackers.
    Meaning(
        "wandb wandb_log wandb_project wandb_run_name report_to run_name run trainer.tracker trainer.tracker.project "
        "trainer.wandb.project",
        "python report.py RUN --to wandb --watch",
        "start it during the run to send metrics as they arrive, or later to send the metrics of a finished run",
    ),
    Meaning("tensorboard logging_dir", "python report.py RUN --to tensorboard --watch"),
    # Runs.
    Meaning(
        "config config_path config_file config_name",
        "python train.py RUN --like runs/quickstart",
        "the configuration is the folder RUN, with model.json and train.json; this command writes a new folder",
    ),
    Meaning(
        "out_dir output_dir trainer.checkpointer.base_path",
        "python train.py RUN",
        "a run writes into its folder RUN",
    ),
    Meaning(
        "depth",
        "python train.py RUN --set n_layers=N --set emb_dim=C",
        "nanochat's depth also sets the width: C is 64 x N",
        TRAINING,
    ),
    Meaning(
        "resume_from_checkpoint resume_from_step trainer.load_checkpoint trainer.load_checkpoint_path",
        "python train.py RUN --resume NAME",
        "without --resume, the same command resumes from the newest checkpoint",
    ),
    Meaning("overwrite_output_dir", "python train.py RUN --resume never", "earlier results are archived"),
    Meaning(
        "model_name_or_path pretrained initialize_from_hf initialize_from", "python train.py RUN --init-from OWNER/NAME"
    ),
    Meaning("do_train", "python train.py RUN"),
    Meaning("eval_only do_eval", "python evaluate.py loss RUN"),
    Meaning("push_to_hub hub_model_id", "python evaluate.py export RUN DIR --push OWNER/NAME"),
    Meaning("hf_save_path", "python evaluate.py export RUN DIR"),
    Meaning(
        "nproc_per_node nnodes num_processes num_gpus gpus local_rank backend ddp_backend",
        "torchrun --standalone --nproc_per_node=N train.py RUN",
        "several machines: docs/nodes.md",
    ),
    Meaning("no_cuda use_cpu device_type", "python train.py RUN --device cpu", scripts=TRAINING),
    Meaning("auto_find_batch_size", "python find_batch_size.py RUN --write"),
    Meaning(
        "eval_batch_size per_device_eval_batch_size", "python evaluate.py loss RUN", "it chooses the batch size itself"
    ),
    Meaning(
        "core_metric_every core_metric_max_per_task", "python evaluate.py core RUN", "training measures only the loss"
    ),
    Meaning("sample_every", "python evaluate.py sample RUN", "report.py shows samples of the checkpoints"),
)

# Keys of other programs that have no counterpart among our keys: what to do instead -> the keys, separated by spaces.
KEYLESS = {
    "train.py --resume continues a run, and train.py --init-from starts from a model": "init_from",
    "the option --device of train.py chooses the device": "device",
    "a run writes into its run directory": "out_dir output_dir",
}


class ForeignKey(NamedTuple):
    """The counterpart in Lockstep of another program's key."""

    ours: str  # such as "train.learning_rate"; "" if there is none
    note: str  # how the values differ, or what to do instead; "" if the values mean the same


def foreign_keys(rows: KeyRows) -> dict[str, ForeignKey]:
    """Return a table of other programs' keys. Some are listed in the rows of our keys; the rest have no counterpart."""
    table: dict[str, ForeignKey] = {}
    for section, keys in rows.items():
        for key, row in keys.items():
            # Another program may use our own name for a key. Such a name needs no entry.
            names = {name: note for name, note in row.foreign_names.items() if name != key}
            table |= {name: ForeignKey(f"{section}.{key}", note) for name, note in names.items()}
    return table | {name: ForeignKey("", note) for note, names in KEYLESS.items() for name in names.split()}


_CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # --set would read Python's constants as strings


def option_advice(command: str, word: str, value: str, rows: KeyRows, *, sets_keys: bool) -> str:
    """Return the end of an error about an unknown option: what to use instead, or "" if no table has the option.

    Arguments:
        command: the script, with its command if it has several: "evaluate.py sample"
        word: the option
        value: the value of the option, or ""
        rows: the rows of our keys
        sets_keys: whether the command has --set, which accepts these keys
    """
    name = word.strip("-").replace("-", "_")
    key = name.rpartition(".")[2]  # a name may have a prefix, such as model.hidden_dim
    section = next((section for section, keys in rows.items() if key in keys), None)
    if sets_keys and section is not None:
        return f"; did you mean --set {section}.{key}={_json_value(value)}?"
    for row in OPTIONS:
        applies = not row.scripts or any(f"{command} ".startswith(f"{script} ") for script in row.scripts)
        if applies and name in row.foreign_names.split():
            return f"; use {row.command}" + (f" ({row.note})" if row.note else "")
    counterpart = foreign_keys(rows).get(key)
    if counterpart is None:
        return ""
    ours, note = counterpart
    if not ours:
        return f"; there is no such key here: {note}"
    if sets_keys and not note:
        return f"; did you mean --set {ours}={_json_value(value)}?"
    setting = f"--set {ours}={'VALUE' if note else _json_value(value)}"
    return f"; use {setting if sets_keys else f'python train.py RUN {setting}'}" + (f" ({note})" if note else "")


def argument_advice(script: str, command: str, argument: str) -> str:
    """Return the end of an error about an unexpected argument.

    If another program accepts such an argument, the text names our option for it. Otherwise it is empty.
    """
    name, equals, value = argument.partition("=")
    if script in ("train.py", "find_batch_size.py") and equals and name.replace(".", "_").isidentifier():
        return f"; did you mean --set {name}={_json_value(value)}?"
    if script == "train.py":  # gpjt's arguments are RUN DATASETS
        return f"; use python train.py RUN --token-files {argument}"
    return ""


def _json_value(value: str) -> str:
    with suppress(ValueError):
        json.loads(value)
        return value
    return _CONSTANTS.get(value, value) or "VALUE"
