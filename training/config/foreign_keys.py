"""Keys of nanoGPT's and Hugging Face's configurations, and what they are called here: hints of error messages."""

from typing import NamedTuple


class Ours(NamedTuple):
    """What another program's key is here."""

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
