"""Keys of other programs and of older versions: translated where they mean the same, else a hint in the error."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import BadInput, nearest, quoted


class Ours(NamedTuple):
    """Lockstep's counterpart of another program's key."""

    key: str | None  # "model.KEY" or "train.KEY"; None: there is none
    note: str = ""  # how the values differ, or what to do instead


_MODEL = {
    "block_size": Ours("model.context_length"),
    "n_ctx": Ours("model.context_length"),
    "n_positions": Ours("model.context_length"),
    "max_position_embeddings": Ours("model.context_length"),
    "max_seq_len": Ours("model.context_length"),
    "seq_len": Ours("model.context_length"),
    "n_embd": Ours("model.emb_dim"),
    "hidden_size": Ours("model.emb_dim"),
    "d_model": Ours("model.emb_dim"),
    "n_head": Ours("model.n_heads"),
    "num_attention_heads": Ours("model.n_heads"),
    "n_layer": Ours("model.n_layers"),
    "num_hidden_layers": Ours("model.n_layers"),
    "dropout": Ours("model.drop_rate"),
    "embd_pdrop": Ours("model.drop_rate"),
    "resid_pdrop": Ours("model.drop_rate"),
    "attn_pdrop": Ours("model.drop_rate"),
    "bias": Ours("model.qkv_bias", "which adds a bias to queries, keys and values only"),
    "tie_word_embeddings": Ours("model.tie_weights"),
}
_BATCH = {
    "batch_size": Ours(
        "train.microbatch_size", "sequences of a GPU in one forward pass; a step has train.global_batch_size"
    ),
    "per_device_train_batch_size": Ours("train.microbatch_size"),
    "train_batch_size": Ours("train.global_batch_size"),
    "gradient_checkpointing": Ours("train.recompute_blocks"),
    "num_train_epochs": Ours("train.max_epochs"),
    "epochs": Ours("train.max_epochs"),
    "max_iters": Ours("train.min_train_tokens", "which counts tokens; the option --max-steps pauses a run"),
    "max_steps": Ours("train.min_train_tokens", "which counts tokens; the option --max-steps pauses a run"),
    "lr_decay_iters": Ours("train.min_train_tokens", "the decay ends with the run"),
}
_OPTIMIZER = {
    "lr": Ours("train.learning_rate"),
    "max_lr": Ours("train.learning_rate"),
    "min_lr": Ours(None, "the cosine ends at a tenth of train.learning_rate"),
    "decay_lr": Ours("train.schedule_learning_rate"),
    "lr_scheduler_type": Ours("train.schedule_learning_rate", "true for warm-up and cosine decay"),
    "warmup_iters": Ours("train.warmup_period_percent", "in percent of all steps"),
    "warmup_steps": Ours("train.warmup_period_percent", "in percent of all steps"),
    "warmup_ratio": Ours("train.warmup_period_percent", "in percent of all steps"),
    "beta1": Ours("train.adam_beta1"),
    "beta2": Ours("train.adam_beta2"),
    "wd": Ours("train.weight_decay"),
    "grad_clip": Ours("train.clipping_max_norm"),
    "max_grad_norm": Ours("train.clipping_max_norm"),
    "optim": Ours("train.optimizer"),
}
_RUN = {
    "eval_interval": Ours("train.validation_interval", "in steps"),
    "eval_steps": Ours("train.validation_interval", "in steps"),
    "eval_iters": Ours("train.validation_sequences", "in sequences"),
    "save_steps": Ours("train.checkpoint_interval", "in steps"),
    "save_total_limit": Ours("train.keep_checkpoints"),
    "logging_steps": Ours("train.log_interval", "in steps"),
    "seed": Ours("train.random_seed"),
    "dtype": Ours("train.precision"),
    "bf16": Ours("train.precision", "bf16"),
    "fp16": Ours("train.precision", "fp16"),
    "torch_compile": Ours("train.compile"),
    "out_dir": Ours(None, "a run writes into its run directory"),
    "output_dir": Ours(None, "a run writes into its run directory"),
    "init_from": Ours(None, "the option --resume of train.py continues a run"),
    "device": Ours(None, "the option --device of train.py chooses the device"),
}
FOREIGN_KEYS = _MODEL | _BATCH | _OPTIMIZER | _RUN


def hint(section: str, key: str, value: Any, keys: Mapping[str, Mapping[str, Any]], *, overridden: bool) -> str:
    """Return what an unknown key of a section may mean: a key of the other file, another program's, or the nearest.

    `keys`: all known keys by section, "model" and "train". `overridden`: given by --set.
    """
    elsewhere = next((Ours(f"{name}.{key}") for name, known in keys.items() if key in known), None)
    ours = elsewhere or FOREIGN_KEYS.get(key)
    if ours is None:
        return nearest(key, keys[section])
    if ours.key is None:
        return f"; there is no such key here: {ours.note}"
    if ours.note:
        return f"; here it is {ours.key}, {ours.note}"
    other, _, name = ours.key.partition(".")
    if overridden:
        return f"; did you mean --set {ours.key}={value if isinstance(value, str) else json.dumps(value)}?"
    return f"; did you mean '{name}'" + ("?" if other == section else f" of {other}.json?")


def translate(model: dict[str, Any], train: dict[str, Any], model_file: Path, train_file: Path) -> list[str]:
    """Replace older spellings of gpjt/ddp-base-model-from-scratch in place; return a notice for each.

    Raises BadInput for mixtures of experts, and for a key given in both spellings with different values.
    """
    notices = []
    if "moe" in model:
        raise BadInput(f"{model_file}: key 'moe': mixtures of experts are not GPT-2; Lockstep trains dense models only")
    if "minibatch_size" in train:
        size = train.pop("minibatch_size")
        if train.setdefault("microbatch_size", size) != size:
            raise BadInput(
                f"{train_file}: minibatch_size {quoted(size)} is the old name of microbatch_size; keep one of them"
            )
        notices.append(f"{train_file}: minibatch_size {size} is read as microbatch_size")
    if "use_amp" in train:
        use_amp = train.pop("use_amp")
        precision = train.setdefault("precision", "auto" if use_amp else "fp32")
        notices.append(f"{train_file}: use_amp {json.dumps(use_amp)[:100]} is read as precision {precision}")
    if "validation_batches" in train:
        batches, size = train.pop("validation_batches"), train.get("microbatch_size")
        if "validation_sequences" in train:
            raise BadInput(f"{train_file}: validation_batches and validation_sequences mean the same; keep the latter")
        if type(batches) is not int or type(size) is not int:
            raise BadInput(
                f"{train_file}: validation_batches: got {quoted(batches)}, wanted a whole number of micro-batches"
            )
        train["validation_sequences"] = batches * size
        notices.append(
            f"{train_file}: validation_batches {batches} of {size} are read as validation_sequences {batches * size}"
        )
    return notices
