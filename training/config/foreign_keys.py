"""Keys of other programs, and keys that are gone: translated where they mean the same, else a hint in the error."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import BadInput, nearest, quoted

# Keys of nanoGPT, Hugging Face and others by ours. After a colon: how the values differ, or what to do instead.
_THEIRS = {
    "model.context_length": "block_size n_ctx n_positions max_position_embeddings max_seq_len seq_len",
    "model.emb_dim": "n_embd hidden_size d_model",
    "model.n_heads": "n_head num_attention_heads",
    "model.n_layers": "n_layer num_hidden_layers",
    "model.drop_rate": "dropout embd_pdrop resid_pdrop attn_pdrop",
    "model.tie_weights": "tie_word_embeddings",
    "model.qkv_bias: of queries, keys and values; model.biases is of all else": "bias",
    "model.n_kv_heads": "num_key_value_heads n_kv_head",
    "model.mlp_width": "intermediate_size n_inner",
    "model.norm_eps": "rms_norm_eps layer_norm_epsilon",
    "model.rope_base": "rope_theta",
    "model.logit_softcap": "final_logit_softcapping",
    "model.scale_attention_by_inverse_layer": "scale_attn_by_inverse_layer_idx",
    "train.microbatch_size": "per_device_train_batch_size",
    "train.microbatch_size: sequences of a GPU in one forward pass; a step has train.global_batch_size": "batch_size",
    "train.global_batch_size": "train_batch_size",
    "train.recompute_blocks": "gradient_checkpointing",
    "train.max_epochs": "num_train_epochs epochs",
    "train.min_train_tokens: which counts tokens; the option --max-steps pauses a run": "max_iters max_steps",
    "train.min_train_tokens: the decay ends with the run": "lr_decay_iters",
    "train.learning_rate": "lr max_lr",
    "train.matrix_learning_rate": "matrix_lr muon_lr",
    "train.embedding_learning_rate": "embedding_lr embed_lr",
    "train.head_learning_rate": "head_lr unembedding_lr",
    "train.vector_learning_rate": "scalar_lr",
    "train.schedule_learning_rate": "decay_lr",
    'train.schedule_learning_rate: "cosine", "linear", "warmup_stable_decay" or "constant"': "lr_scheduler_type "
    "lr_scheduler scheduler schedule lr_schedule learning_rate_schedule",
    "train.decay_period_percent: in percent of all steps": "warmdown_iters cooldown_frac warmdown_ratio decay_ratio",
    "train.warmup_period_percent: in percent of all steps": "warmup_iters warmup_steps warmup_step warmup_ratio",
    "train.adam_beta1": "beta1",
    "train.adam_beta2": "beta2",
    "train.weight_decay": "wd",
    "train.clipping_max_norm": "grad_clip max_grad_norm",
    "train.optimizer": "optim",
    "train.keep_checkpoints": "save_total_limit",
    "train.checkpoint_interval: in steps": "save_steps",
    "train.log_interval: in steps": "logging_steps",
    "train.validation_interval: in steps": "eval_interval eval_steps",
    "train.validation_sequences: in sequences": "eval_iters",
    "train.random_seed": "seed",
    "train.precision": "dtype",
    "train.precision: bf16": "bf16",
    "train.precision: fp16": "fp16",
    "train.compile": "torch_compile",
    "train.final_learning_rate_percent: in percent of train.learning_rate": "min_lr min_lr_ratio final_lr_frac",
    ": the options --resume and --init-from of train.py continue a run, or start from a model": "init_from",
    ": the option --device of train.py chooses the device": "device",
    ": a run writes into its run directory": "out_dir output_dir",
}
# Keys of train.json that are read no more.
_GONE = dict.fromkeys(("on_spike", "spike_window", "spike_zscore"), "steps that are not finite alone are held back")
FOREIGN_KEYS = {name: ours for ours, names in _THEIRS.items() for name in names.split()}


def hint(section: str, key: str, value: Any, keys: Mapping[str, Mapping[str, Any]], *, overridden: bool) -> str:
    """Return the likely meaning of an unknown key: one of the other file, of another program, or the nearest."""
    elsewhere = next((f"{name}.{key}" for name, known in keys.items() if key in known), None)
    meant = elsewhere or FOREIGN_KEYS.get(key)
    if meant is None:
        return nearest(key, keys[section])
    ours, _, note = meant.partition(": ")
    if note:
        return f"; here it is {ours}, {note}" if ours else f"; there is no such key here: {note}"
    if overridden:
        return f"; did you mean --set {ours}={value if isinstance(value, str) else json.dumps(value)}?"
    other, _, name = ours.partition(".")
    return f"; did you mean '{name}'" + ("?" if other == section else f" of {other}.json?")


def translate(model: dict[str, Any], train: dict[str, Any], model_file: Path, train_file: Path) -> list[str]:
    """Replace older spellings of gpjt's in place; return a notice for each. Raises BadInput for contradictions."""
    gone = [key for key in _GONE if train.pop(key, None) is not None]
    notices = [f"NOTE: {train_file}: {key} is ignored: {_GONE[key]}" for key in gone]
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
        if type(use_amp) is not bool:
            raise BadInput(f"{train_file}: use_amp: got {quoted(use_amp)}, wanted true or false")
        read = "ignored beside" if "precision" in train else "read as"
        precision = train.setdefault("precision", "auto" if use_amp else "fp32")
        notices.append(f"{train_file}: use_amp {json.dumps(use_amp)} is {read} precision {precision}")
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
