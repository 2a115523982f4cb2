"""Model configuration (model.json): shape and options of a network.

C embedding width, H heads, K key-value heads, D head width (C = H * D), L layers, M MLP width, T context length,
V vocabulary size. Each option defaults to GPT-2; docs/architecture.md has their sources.
An option is one row of the table, a field of ModelConfig: default and check, how the stock classes of Hugging Face's
transformers say it, the attention it leaves, and its words for the model card. The network itself is in gpt.py;
parameters, bytes and all FLOPs but those of attention are counted from it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from common import checks
from common.errors import InvalidValue, Problem

# Stock classes, by their `model_type`.
GPT2, LLAMA, ARCEE, QWEN3, NANOCHAT = "gpt2", "llama", "arcee", "qwen3", "nanochat"
ROTARY = (LLAMA, ARCEE, QWEN3, NANOCHAT)  # with RoPE: the same keys of config.json
EVERY: dict[str, None] = dict.fromkeys((GPT2, *ROTARY))

INITIAL_STD = 0.02  # linear and token-embedding weights, as in OpenAI's model.py
VOCABULARY_MULTIPLE = 128  # rows of the embedding in memory: matmuls over 50,304 rows are faster than over 50,257

GATED = ("swiglu",)  # activations of an MLP with a third matrix, its gate
# In the MLP, and their words in a model card: GPT-2's, the exact one, ReLU squared.
ACTIVATION_WORDS = {
    "gelu_tanh": "GELU, approximated by tanh",
    "gelu": "exact GELU",
    "relu2": "squared ReLU",
    "swiglu": "SwiGLU",
}
STOCK_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu2": "relu2", "swiglu": "silu"}  # transformers' words
UNGATED = tuple(name for name in ACTIVATION_WORDS if name not in GATED)
BIASES = {  # of queries, keys and values; of all else
    (True, True): "all",
    (True, False): "of queries, keys and values",
    (False, True): "all but those of queries, keys and values, which are zeros here",
    (False, False): "none; those that the class has are zeros here",
}


@attrs.frozen(kw_only=True)
class ArchitectureOption:
    """A row of the table, beside default and check; `config`: a ModelConfig."""

    # Stock class -> values that it computes, None: all. A class that is not here computes the default alone.
    stock: Mapping[str, tuple[Any, ...] | None] = attrs.field(factory=dict)
    keys: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)  # stock class -> keys of its config.json
    # config, stock class -> value of these keys, attrs.NOTHING to leave them out; None: the field's own
    says: Callable[[Any, str], Any] | None = None
    window: Callable[[Any], int | None] | None = None  # config -> tokens that a query attends to, at most; None: all
    card: Callable[[Any, str], tuple[str, str] | None] | None = None  # config, stock class -> row of the model card
    divided: str | None = None  # ModelConfig's number of which each tensor shard has an equal part


def option(check: Callable[..., None], default: Any = attrs.NOTHING, **row: Any) -> Any:
    """Return a field of ModelConfig with its row, an ArchitectureOption of `row`."""
    return attrs.field(default=default, validator=check, metadata={ArchitectureOption: ArchitectureOption(**row)})


def rows(config_class: Any) -> dict[str, ArchitectureOption]:
    """Return the table, by key; a field without a row is not in it."""
    fields = attrs.fields(config_class)
    return {field.name: field.metadata[ArchitectureOption] for field in fields if ArchitectureOption in field.metadata}


def named(gpt2: str, rotary: str) -> dict[str, tuple[str, ...]]:
    """Return keys of config.json, separated by spaces: of GPT2's class, and of those with RoPE."""
    return {GPT2: tuple(gpt2.split()), **dict.fromkeys(ROTARY, tuple(rotary.split()))}


@attrs.frozen(kw_only=True)
class ModelConfig:
    """The fields of `model.json`, a row each. Spellings are those of gpjt/ddp-base-model-from-scratch."""

    vocab_size: int = option(  # token ids are 0 .. vocab_size - 1
        checks.integer(2, 1 << 24), stock=EVERY, keys=named("vocab_size", "vocab_size"), divided="padded_vocab_size"
    )
    context_length: int = option(  # T, tokens
        checks.integer(1, 1 << 24),
        stock=EVERY,
        keys=named("n_positions n_ctx", "max_position_embeddings"),
        card=lambda config, _: ("context", f"{config.context_length:,} tokens"),
        divided="context_length",
    )
    emb_dim: int = option(checks.integer(1, 1 << 20), stock=EVERY, keys=named("n_embd", "hidden_size"))  # C
    n_heads: int = option(  # H; head width is C / H
        checks.integer(1, 1 << 20), stock=EVERY, keys=named("n_head", "num_attention_heads"), divided="n_heads"
    )
    n_layers: int = option(  # L
        checks.integer(1, 10_000),
        stock=EVERY,
        keys=named("n_layer", "num_hidden_layers"),
        card=lambda config, _: ("layers, heads, width", f"{config.n_layers}, {config.n_heads}, {config.emb_dim}"),
    )
    drop_rate: float = option(  # the classes with RoPE have that of attention alone
        checks.number(0.0, 0.99), 0.0, stock=EVERY, keys=named("attn_pdrop embd_pdrop resid_pdrop", "attention_dropout")
    )
    qkv_bias: bool = option(  # missing ones are zeros in the classes
        checks.boolean(),
        False,
        stock=EVERY,
        keys=named("", "attention_bias"),
        says=lambda config, _: config.qkv_bias or config.biases,
    )
    tie_weights: bool = option(  # output head = token embedding
        checks.boolean(),
        False,
        stock=EVERY,
        keys=named("tie_word_embeddings", "tie_word_embeddings"),
        says=lambda config, stock: config.tie_weights and not config.folds_embedding_norm(stock),
        card=lambda config, _: ("output head", "the token embedding" if config.tie_weights else "weights of its own"),
    )
    activation: str = option(  # in the MLP
        checks.one_of(*ACTIVATION_WORDS),
        "gelu_tanh",
        stock={GPT2: UNGATED, LLAMA: GATED, ARCEE: UNGATED, QWEN3: GATED, NANOCHAT: UNGATED},
        keys=named("activation_function", "hidden_act"),
        says=lambda config, _: STOCK_ACTIVATIONS[config.activation],
        card=lambda config, _: ("MLP", f"{ACTIVATION_WORDS[config.activation]}, hidden width {config.hidden_width:,}"),
    )
    mlp_width: int | None = option(  # M; 4 C
        checks.optional(checks.integer(1, 1 << 24)),
        None,
        stock=EVERY,
        keys=named("n_inner", "intermediate_size"),
        says=lambda config, stock: config.mlp_width if stock == GPT2 else config.hidden_width,
        divided="hidden_width",
    )
    biases: bool = option(  # of all other linear layers and LayerNorms; missing ones are zeros in the classes
        checks.boolean(),
        True,
        stock={GPT2: None, LLAMA: None, ARCEE: None, QWEN3: (False,), NANOCHAT: (False,)},
        keys=dict.fromkeys((LLAMA, ARCEE), ("mlp_bias",)),
        card=lambda config, _: ("biases", BIASES[config.qkv_bias, config.biases]),
    )
    norm: str = option(
        checks.one_of("layernorm", "rmsnorm"),
        "layernorm",
        stock=dict.fromkeys(ROTARY, ("rmsnorm",)),
        card=lambda config, _: ("norm", {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[config.norm] + config.no_gain),
    )
    norm_gain: bool = option(  # false: norms have no parameters; ones in the classes that have them
        checks.boolean(), True, stock={**EVERY, NANOCHAT: (False,)}
    )
    norm_eps: float = option(
        checks.number(0.0, 1.0, above=True), 1e-5, stock=EVERY, keys=named("layer_norm_epsilon", "rms_norm_eps")
    )
    positions: str = option(
        checks.one_of("learned", "rope"),
        "learned",
        stock=dict.fromkeys(ROTARY, ("rope",)),
        card=lambda config, _: (
            "positions",
            "learned" if config.positions == "learned" else f"rotary (RoPE), base {config.rope_base:g}",
        ),
    )
    rope_base: float = option(checks.number(1.0, above=True), 10_000.0, stock=EVERY, keys=named("", "rope_theta"))
    n_kv_heads: int | None = option(  # K; H
        checks.optional(checks.integer(1, 1 << 20)),
        None,
        stock=dict.fromkeys(ROTARY),
        keys=named("", "num_key_value_heads"),
        says=lambda config, _: config.kv_heads,
        card=lambda config, _: config.n_kv_heads and ("heads of keys and values", str(config.n_kv_heads)),
        divided="kv_heads",
    )
    qk_norm: bool = option(  # RMSNorm of each query and key
        checks.boolean(),
        False,
        stock={QWEN3: (True,), NANOCHAT: (True,)},
        card=lambda config, _: config.qk_norm and ("queries and keys", f"normalized by RMSNorm{config.no_gain}"),
    )
    scale_attention_by_inverse_layer: bool = option(  # 1 / layer, from 1
        checks.boolean(),
        False,
        stock={GPT2: None},
        keys={GPT2: ("scale_attn_by_inverse_layer_idx",)},
        says=lambda config, _: config.scale_attention_by_inverse_layer or attrs.NOTHING,
        card=lambda config, _: (
            config.scale_attention_by_inverse_layer
            and ("attention scores", "divided by the number of the layer, from 1")
        ),
    )
    embedding_norm: bool = option(  # of the token embedding; folded into the table for classes that lack it
        checks.boolean(),
        False,
        stock={**EVERY, NANOCHAT: (True,)},
        card=lambda config, stock: config.embedding_norm and ("token embedding", _normalized(config, stock)),
    )
    logit_softcap: float | None = option(
        checks.optional(checks.number(0.0, above=True)),
        None,
        stock={NANOCHAT: None},
        keys={NANOCHAT: ("final_logit_softcapping",)},
        card=lambda config, _: config.logit_softcap and ("logits", f"soft-capped by tanh at {config.logit_softcap:g}"),
    )
    zero_init_projections: bool = option(checks.boolean(), False, stock=EVERY)  # back to the residual stream
    zero_init_head: bool = option(checks.boolean(), False, stock=EVERY)

    def __attrs_post_init__(self) -> None:
        if self.emb_dim % self.n_heads:
            raise _contradiction("emb_dim", self.emb_dim, f"a multiple of n_heads, {self.n_heads}", "n_heads")
        if self.n_heads % self.kv_heads:
            raise _contradiction("n_kv_heads", self.n_kv_heads, f"a divisor of n_heads, {self.n_heads}", "n_heads")
        if self.positions == "rope" and self.head_width % 2:
            found, wanted = f'"rope" with heads of width {self.head_width}', "an even emb_dim / n_heads"
            raise _contradiction("positions", found, wanted, "emb_dim", "n_heads", cause="it rotates pairs")
        if self.zero_init_head and self.tie_weights:
            wanted, cause = "false, because tie_weights is true", "the head is the token embedding"
            raise _contradiction("zero_init_head", "true", wanted, "tie_weights", cause=cause)
        checks.set_one_form(self, n_kv_heads=self.n_heads, mlp_width=4 * self.emb_dim)

    @property
    def head_width(self) -> int:
        return self.emb_dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: K."""
        return self.n_kv_heads or self.n_heads

    @property
    def qkv_heads(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values, in the order of the fused matrix: H, K, K."""
        return self.n_heads, self.kv_heads, self.kv_heads

    @property
    def qkv_width(self) -> int:
        """Rows of the fused matrix of queries, keys and values: (H + 2 K) D."""
        return sum(self.qkv_heads) * self.head_width

    @property
    def hidden_width(self) -> int:
        """Hidden width of the MLP: M."""
        return self.mlp_width or 4 * self.emb_dim

    def folds_embedding_norm(self, stock: str) -> bool:
        """Tell whether a class lacks the norm of the token embedding, which is then folded into the exported table."""
        return self.embedding_norm and stock != NANOCHAT

    @property
    def no_gain(self) -> str:
        return "" if self.norm_gain else ", without gain"

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding in memory; checkpoints hold the first `vocab_size` of them."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


GPT2_SMALL = ModelConfig(
    vocab_size=50257, context_length=1024, emb_dim=768, n_heads=12, n_layers=12, qkv_bias=True, tie_weights=True
)
GPT2_SIZES = {  # Radford et al. 2019, table 2, as released by OpenAI
    "124M": GPT2_SMALL,
    "350M": attrs.evolve(GPT2_SMALL, emb_dim=1024, n_heads=16, n_layers=24),
    "774M": attrs.evolve(GPT2_SMALL, emb_dim=1280, n_heads=20, n_layers=36),
    "1.5B": attrs.evolve(GPT2_SMALL, emb_dim=1600, n_heads=25, n_layers=48),
}


def attention_window(config: ModelConfig) -> int | None:
    """Return the tokens that a query attends to, at most, itself included, as the options state it; None: all."""
    windows = (row.window(config) for row in rows(type(config)).values() if row.window is not None)
    return min((window for window in windows if window is not None), default=None)


def shard_counts(config: ModelConfig) -> list[int]:
    """Return the numbers of tensor shards that all options can share."""
    return [shards for shards in range(1, config.n_heads + 1) if not undivided(config, shards)]


def undivided(config: ModelConfig, shards: int) -> dict[str, int]:
    """Return the numbers that so many tensor shards cannot divide, by their names in ModelConfig."""
    names = [row.divided for row in rows(type(config)).values() if row.divided]
    # Heads of keys and values, where they are fewer, lie on several shards each.
    fewer = "kv_heads" if shards % config.kv_heads == 0 else None
    return {name: getattr(config, name) for name in names if getattr(config, name) % shards and name != fewer}


def _contradiction(key: str, found: object, expected: str, *other_keys: str, cause: str = "") -> InvalidValue:
    return InvalidValue(Problem(key=key, found=str(found), expected=expected, cause=cause, other_keys=other_keys))


def _normalized(config: ModelConfig, stock: str) -> str:
    if not config.folds_embedding_norm(stock):
        return "normalized"
    head = ", and the head is the table before" if config.tie_weights else ""
    return f"normalized in training; here the table is{head}"
