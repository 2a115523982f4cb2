"""Convert GPT-2 state dicts from other programs to plain state dicts, and load plain state dicts into a network.

A plain state dict uses our names. The names of Hugging Face, nanoGPT, OpenAI's released code and
gpjt/ddp-base-model-from-scratch (whose names come from Raschka's book) are recognized, even with a prefix that a
wrapper has added (DDP, torch.compile, a model class).

C embedding width, L layers, T context length, V vocabulary size.
"""

import re

import torch
from torch import Tensor

from model.axes import unpadded
from model.config import ModelConfig
from model.gpt import GPT

WRAPPERS = re.compile(r"(?:(?:module|_orig_mod|model|transformer)[./])+")
PARAMETER = re.compile(
    r"(?:(?:h|trf_blocks|blocks)\.(?P<layer>\d+)\.)?(?P<module>.+?)(?:\.(?P<leaf>weight|bias|scale|shift|[gbw]))?"
)
LEAVES = {"scale": "weight", "g": "weight", "w": "weight", "shift": "bias", "b": "bias", None: "weight"}
# Our module -> its name in Hugging Face and nanoGPT. OpenAI's names have slashes instead of dots.
HUGGING_FACE = {
    **{"attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj"},
    **{"mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    **{"token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f", "head": "lm_head"},
}
# Another program's module -> our module
MODULES = {
    **{theirs: ours for ours, theirs in HUGGING_FACE.items()},
    **{"norm1": "attention_norm", "att.out_proj": "attention.output"},
    **{"norm2": "mlp_norm", "ff.layers.0": "mlp.up", "ff.layers.2": "mlp.down"},
    **{"tok_emb": "token_embedding", "pos_emb": "position_embedding", "out_head": "head"},
}
BUFFERS = ("attn", "attn.masked_bias", "att.mask")  # causal masks; the full name of the first is attn.bias
GPJT_QKV = ("att.W_query", "att.W_key", "att.W_value")  # in the order of attention.qkv
BLOCK_PARTS = ("attention_norm", "attention.qkv", "attention.output", "mlp_norm", "mlp.up", "mlp.down")
PROJECTIONS = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")


def is_nanogpt(state: dict[str, Tensor]) -> bool:
    """Return whether weights are from nanoGPT, which uses Hugging Face's names, but the layout of nn.Linear."""
    return any(
        name.endswith("attn.c_attn.weight") and value.shape[0] > value.shape[-1] for name, value in state.items()
    )


def to_plain(state: dict[str, Tensor], *, tied: bool = False) -> dict[str, Tensor]:
    """Convert a state dict with the names of any supported program to a plain state dict in fp32.

    The output head is dropped if it is `tied` or equal to the token embedding. nanoGPT always ties these two weights
    and stores only the head; in this case, the head becomes the embedding. Raises ValueError if a parameter is unknown
    or missing, or if a `tied` head differs from the embedding.
    """
    plain: dict[str, Tensor] = {}
    for name, value in state.items():
        our_name = _our_name(name)
        if our_name is not None:
            # OpenAI's projections are convolutions of width 1: (1, in, out)
            plain[our_name] = (value[0] if value.dim() == 3 and value.shape[0] == 1 else value).float()
    for layer in range(_layers(plain)):
        _join(plain, f"blocks.{layer}")
    _transpose(plain)
    head, embedding = plain.get("head.weight"), plain.get("token_embedding.weight")
    stored_once = embedding is None and is_nanogpt(state)
    same = head is not None and embedding is not None and torch.equal(head, embedding)
    if tied and not same and head is not None and embedding is not None:
        raise ValueError("its configuration ties the output head to the token embedding, but their weights differ")
    if head is not None and (tied or stored_once or same):
        plain.setdefault("token_embedding.weight", plain.pop("head.weight"))
    _complete(plain)
    return plain


def config_of(plain: dict[str, Tensor], heads: int, activation: str = "gelu_tanh") -> ModelConfig:
    """Return the configuration of the network with this plain state dict.

    Raises ValueError if C is not divisible by `heads`.
    """
    vocabulary, width = plain["token_embedding.weight"].shape
    return ModelConfig(
        vocab_size=vocabulary,
        context_length=plain["position_embedding.weight"].shape[0],
        emb_dim=width,
        n_heads=heads,
        n_layers=_layers(plain),
        qkv_bias="blocks.0.attention.qkv.bias" in plain,
        activation=activation,
        mlp_width=len(plain["blocks.0.mlp.up.weight"]),
        tie_weights="head.weight" not in plain,
    )


def load_plain(model: GPT, state: dict[str, Tensor]) -> None:
    """Load a plain state dict into a model on one device. Raises ValueError if a parameter does not fit."""
    parameters = dict(model.named_parameters())
    for name in sorted(parameters.keys() ^ state.keys()):
        raise ValueError(f"parameter {name} is {'missing' if name in parameters else 'unknown'}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            target, source = unpadded(name, parameter, model.config), state[name]
            if source.shape != target.shape:
                raise ValueError(f"parameter {name}: got shape {tuple(source.shape)}, wanted {tuple(target.shape)}")
            parameter.zero_()  # the padding of the vocabulary stays zero
            target.copy_(source)


def _our_name(name: str) -> str | None:
    """Return our name for another program's parameter, or None for a buffer.

    The separate queries, keys and values of gpjt keep separate names. Raises ValueError if the parameter is unknown.
    """
    wrapper = WRAPPERS.match(name)
    inner = name[wrapper.end() :] if wrapper else name
    match = PARAMETER.fullmatch(re.sub(r"^h(\d)", r"h.\1", inner.replace("/", ".")))
    assert match is not None  # the group `module` matches any text
    module = match["module"]
    if module in BUFFERS:
        return None
    our_module = MODULES.get(module, module)
    if our_module not in (*HUGGING_FACE, *GPJT_QKV):
        raise ValueError(f"parameter {name} does not belong to a GPT-2")
    prefix = "" if match["layer"] is None else f"blocks.{match['layer']}."
    return f"{prefix}{our_module}.{LEAVES.get(match['leaf'], match['leaf'])}"


def _layers(plain: dict[str, Tensor]) -> int:
    numbers = {int(match[1]) for name in plain if (match := re.match(r"blocks\.(\d+)\.", name))}
    return max(numbers) + 1 if numbers else 0


def _join(plain: dict[str, Tensor], block: str) -> None:
    """Join the separate queries, keys and values of gpjt into one parameter of a block, in place."""
    for leaf in ("weight", "bias"):
        parts = [plain.pop(f"{block}.{name}.{leaf}") for name in GPJT_QKV if f"{block}.{name}.{leaf}" in plain]
        if len(parts) == len(GPJT_QKV):
            plain[f"{block}.attention.qkv.{leaf}"] = torch.cat(parts)
        elif parts:
            raise ValueError(f"{block}: got only {len(parts)} of the three {leaf} tensors of queries, keys and values")


def _transpose(plain: dict[str, Tensor]) -> None:
    """Transpose projections to nn.Linear's layout if they are stored as (in, out).

    The fused projection of queries, keys and values is not square, so its shape shows how projections are stored.
    """
    widest = plain.get("blocks.0.attention.qkv.weight")
    if widest is None or widest.dim() != 2 or widest.shape[0] > widest.shape[1]:
        return
    for name, value in plain.items():
        if name.startswith("blocks.") and name.endswith(tuple(f"{part}.weight" for part in PROJECTIONS)):
            plain[name] = value.t()


def _complete(plain: dict[str, Tensor]) -> None:
    """Add zeros for biases that nanoGPT may omit. Raises ValueError if a weight is missing."""
    block_modules = [f"blocks.{layer}.{part}" for layer in range(_layers(plain)) for part in BLOCK_PARTS]
    for module in ("token_embedding", "position_embedding", *block_modules, "final_norm"):
        if f"{module}.weight" not in plain:
            raise ValueError(f"parameter {module}.weight is missing")
        if not module.endswith(("embedding", "attention.qkv")) and f"{module}.bias" not in plain:
            plain[f"{module}.bias"] = torch.zeros(plain[f"{module}.weight"].shape[0])
    if not block_modules:
        raise ValueError("the network has no blocks")
