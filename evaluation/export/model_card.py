"""The README.md of an exported model, from what its run recorded. What is not known has no line."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evaluation.export.run_cost import cost_of
from evaluation.shared.load import ModelLocation, Trained
from model.config import ModelConfig, parameter_count
from tokens.hub.download import hub_name
from training.checkpoints import directory as checkpoint
from training.checkpoints.compatibility import listed
from training.config.key_groups import OPTIMIZERS
from training.telemetry.metrics_log import read_metrics


def model_card(trained: Trained, name: str, license_name: str | None) -> str:
    """Return the card; the front matter is what the hub reads. `name`: OWNER/NAME or a folder's."""
    config = trained.network.config
    front = [
        "---",
        *([f"license: {license_name}"] if license_name else []),
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:\n- gpt2\n- lockstep",
        "---",
    ]
    body = [
        f"# {name.rpartition('/')[2]}",
        f"A GPT-2 of {parameter_count(config):,} parameters, a base model: it continues text and follows no "
        "instructions. Loaded as Hugging Face's own GPT-2, without remote code:",
        _code(name),
        "## Model",
        _table(_shape(trained, config)),
    ]
    training = list(_training(trained))
    if training:
        body += ["## Training", "By Lockstep's `train.py`, from random weights.", _table(training)]
    return "\n".join(front) + "\n\n" + "\n\n".join(body) + "\n"


def _shape(trained: Trained, config: ModelConfig) -> Iterator[tuple[str, str]]:
    yield "layers, heads, width", f"{config.n_layers}, {config.n_heads}, {config.emb_dim}"
    yield "context", f"{config.context_length:,} tokens"
    yield "tokenizer", f"`{trained.tokenizer.name}`: {trained.tokenizer.vocabulary_size:,} ids"
    yield "output head", "the token embedding" if config.tie_weights else "weights of its own"
    yield "bias of queries, keys and values", "yes" if config.qkv_bias else "no: zeros here"
    yield "activation", "GELU, approximated by tanh" if config.activation == "gelu_tanh" else "exact GELU"
    yield "weights", "fp32"


def _training(trained: Trained) -> Iterator[tuple[str, str]]:
    """Yield what is known of the run, in a reader's order."""
    place = trained.place
    if not place.is_own:
        return
    state = checkpoint.read_state(place.path)
    config = state["config"]
    train = config["train"]
    known = place.record
    cost = cost_of(state, known)
    length = config["model"]["context_length"]
    directories = [Path(stream["directory"]) for stream in listed(config.get("train_stream", []))]
    names = [hub_name(directory) or directory.resolve().name for directory in directories]
    if names:
        yield "dataset", ", ".join(f"`{name}`" for name in names)
    yield "tokens", f"{cost.tokens:,}"
    batch = config["global_batch_size"]
    yield "global batch", f"{batch:,} sequences of {length:,} tokens, {batch * length:,} tokens"
    yield "updates", f"{state['step']:,} of {config['steps']:,}"
    yield "optimizer", _optimizer(train)
    yield "seed", str(train["random_seed"])
    yield from _losses(place, state)
    environment = known.get("environment", {})
    if environment:
        yield "machine", f"{environment['world_size']} x {environment['device']}"
        yield "precision", str(config.get("numerics", {}).get("precision", train["precision"]))
        yield "software", f"torch {environment['packages']['torch']}, Python {environment['python']}"
    yield "time", f"{cost.hours:,.2f} hours"
    if cost.dollars is not None:
        yield "cost", f"${cost.dollars:,.2f} at ${known['price_per_hour']:,.2f} an hour"
    if config.get("git_commit"):
        yield "commit", f"`{config['git_commit']}`"


def _losses(place: ModelLocation, state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    losses = [
        record["train_loss"]
        for record in (read_metrics(place.run) if place.run is not None else [])
        if "train_loss" in record and record["step"] <= state["step"]
    ]
    if losses:
        yield "training loss", f"{losses[-1]:.4f} nats a token"
    loss = state["validation_loss"]
    if loss is not None:
        yield "validation loss", f"{loss:.4f} nats a token (perplexity {math.exp(loss):,.2f})"


def _optimizer(train: dict[str, Any]) -> str:
    values = {key: train.get(key) for key in ("learning_rate", "adam_beta1", "adam_beta2", "weight_decay")}
    schedule = "warm-up, then cosine" if train["schedule_learning_rate"] else "constant"
    return (
        f"{OPTIMIZERS[train.get('optimizer', 'adamw')]}, learning rate {values['learning_rate']:g} ({schedule}), "
        f"betas {values['adam_beta1']:g} and {values['adam_beta2']:g}, weight decay {values['weight_decay']:g}"
    )


def _table(rows: Any) -> str:
    return "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows)


def _code(name: str) -> str:
    return f"""```python
from transformers import pipeline

speak = pipeline("text-generation", "{name}")
print(speak("Every effort moves you", max_new_tokens=40)[0]["generated_text"])
```"""
