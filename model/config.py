"""Model configuration (model.json): shape and options of a network.

C embedding width, H heads, K key-value heads, D head width (C = H * D), L layers, M MLP width, T context length,
V vocabulary size. Each option defaults to GPT-2; docs/architecture.md has their sources.
An option is one row of the table, a field of ModelConfig: default and check, its meaning, its names in other programs,
how the stock classes of Hugging Face's transformers say it, and its words for the model card. The network itself is in
gpt.py; parameters, bytes and all FLOPs except those of attention are counted from it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from common import checks
from common.checks import ValueCheck, key_field
from common.errors import InvalidValue, Problem

# Stock classes, by their `model_type`.
GPT2, LLAMA, ARCEE, QWEN3, NANOCHAT = "gpt2", "llama", "arcee", "qwen3", "nanochat"
ROTARY = (LLAMA, ARCEE, QWEN3, NANOCHAT)  # with RoPE: the same keys of config.json
EVERY: dict[str, None] = dict.fromkeys((GPT2, *ROTARY))
OF_NANOGPT = "nanogpt"  # another program whose model files are read, see `named`

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
_RENAMED = {name: word for name, word in STOCK_ACTIVATIONS.items() if name != word}
# By transformers' words, of which one activation has two.
OUR_ACTIVATIONS = {word: name for name, word in STOCK_ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
UNGATED = tuple(name for name in ACTIVATION_WORDS if name not in GATED)
BIASES = {  # of queries, keys and values; of all else
    (True, True): "all",
    (True, False): "of queries, keys and values",
    (False, True): "all but those of queries, keys and values, which are zeros here",
    (False, False): "none; those that the class has are zeros here",
}


@attrs.frozen(kw_only=True)
class ArchitectureOption:
    """Part of an option's row that other keys do not have. In the comments, `config` is a ModelConfig."""

    # Stock class -> values that it computes, None: all. A class that is not here computes the default alone.
    stock: Mapping[str, tuple[Any, ...] | None] = attrs.field(factory=dict)
    # Stock class or other program -> keys that state this option in its config.json or model file
    keys: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    # config, stock class -> value of these keys, attrs.NOTHING to leave them out; None: the field's own
    says: Callable[[Any, str], Any] | None = None
    card: Callable[[Any, str], tuple[str, str] | None] | None = None  # config, stock class -> row of the model card
    divided: str | None = None  # ModelConfig's number of which each tensor shard has an equal part

    @property
    def file_keys(self) -> tuple[str, ...]:
        """All names that model files of other programs have for this option."""
        return tuple(dict.fromkeys(key for keys in self.keys.values() for key in keys))


def option(
    check: ValueCheck,
    default: Any = attrs.NOTHING,
    *,
    meaning: str,
    names: str = "",
    keys_note: str = "",
    **row: Any,
) -> Any:
    """Return a field of ModelConfig with its rows, a KeyRow and an ArchitectureOption of `row`.

    The keys of other programs' model files are also names by which errors recognize the option. `names`: others that
    only command lines have. `keys_note`: what to know about the values of the keys in model files, if they differ.
    """
    architecture = ArchitectureOption(**row)
    file_keys = " ".join(architecture.file_keys)
    foreign: dict[str, Any] = {"names": f"{file_keys} {names}"}
    if keys_note:
        foreign = {"names": names, "similar": {keys_note: file_keys}}
    return key_field(check, default, metadata={ArchitectureOption: architecture}, meaning=meaning, **foreign)


def rows(config_class: Any) -> dict[str, ArchitectureOption]:
    """Return the table, by key; a field without a row is not in it."""
    fields = attrs.fields(config_class)
    return {field.name: field.metadata[ArchitectureOption] for field in fields if ArchitectureOption in field.metadata}


def stock_keys(kind: str) -> dict[str, str]:
    """Return the key of a stock class's config.json that states each option; of several with one value the first."""
    return {name: row.keys[kind][0] for name, row in rows(ModelConfig).items() if row.keys.get(kind)}


def named(gpt2: str, rotary: str, **others: str) -> dict[str, tuple[str, ...]]:
    """Return the keys of model files, by stock class and program, from names that are separated by spaces.

    `rotary` are the names of all classes with RoPE. `others` are nanogpt's checkpoint, openai's hparams.json and meta's
    params.json; names that they share with GPT2's config.json need not be repeated.
    """
    keys = {GPT2: gpt2, **dict.fromkeys(ROTARY, rotary), **others}
    return {program: tuple(names.split()) for program, names in keys.items()}


@attrs.frozen(kw_only=True)
class ModelConfig:
    """The fields of `model.json`, a row each. Spellings are those of gpjt/ddp-base-model-from-scratch."""

    vocab_size: int = option(
        checks.integer(2, 1 << 24),
        meaning="size of the vocabulary; token ids are 0 to vocab_size - 1",
        stock=EVERY,
        keys=named("vocab_size", "vocab_size", openai="n_vocab"),
        divided="padded_vocab_size",
    )
    context_length: int = option(  # T
        checks.integer(1, 1 << 24),
        meaning="number of tokens that the network sees at once",
        names="max_seq_len seq_len",
        stock=EVERY,
        keys=named("n_positions n_ctx", "max_position_embeddings", nanogpt="block_size"),
        card=lambda config, _: ("context", f"{config.context_length:,} tokens"),
        divided="context_length",
    )
    emb_dim: int = option(  # C
        checks.integer(1, 1 << 20),
        meaning="width of the network; a multiple of n_heads",
        names="d_model hidden_dim",
        stock=EVERY,
        keys=named("n_embd", "hidden_size", meta="dim"),
    )
    n_heads: int = option(  # H; head width is C / H
        checks.integer(1, 1 << 20),
        meaning="number of attention heads",
        names="num_heads",
        stock=EVERY,
        keys=named("n_head", "num_attention_heads"),
        divided="n_heads",
    )
    n_layers: int = option(  # L
        checks.integer(1, 10_000),
        meaning="number of blocks",
        names="num_layers",
        stock=EVERY,
        keys=named("n_layer", "num_hidden_layers"),
        card=lambda config, _: ("layers, heads, width", f"{config.n_layers}, {config.n_heads}, {config.emb_dim}"),
    )
    drop_rate: float = option(  # the classes with RoPE have only that of attention
        checks.number(0.0, 0.99),
        0.0,
        meaning="dropout of embeddings, attention and residual branches",
        stock=EVERY,
        keys=named("attn_pdrop embd_pdrop resid_pdrop", "attention_dropout", nanogpt="dropout"),
    )
    qkv_bias: bool = option(  # missing ones are zeros in the classes
        checks.boolean(),
        False,
        meaning="biases of queries, keys and values; GPT-2 has them",
        stock=EVERY,
        keys=named("", "attention_bias", nanogpt="bias"),
        keys_note="of queries, keys and values; model.biases is of all else",
        says=lambda config, _: config.qkv_bias or config.biases,
    )
    tie_weights: bool = option(
        checks.boolean(),
        False,
        meaning="use the token embedding as the output head, as GPT-2 does",
        stock=EVERY,
        keys=named("tie_word_embeddings", "tie_word_embeddings"),
        says=lambda config, stock: config.tie_weights and not config.folds_embedding_norm(stock),
        card=lambda config, _: ("output head", "the token embedding" if config.tie_weights else "weights of its own"),
    )
    activation: str = option(
        checks.one_of(*ACTIVATION_WORDS),
        "gelu_tanh",
        meaning='activation of the MLP: "gelu_tanh" is GPT-2\'s tanh approximation, "gelu" the exact GELU of nanoGPT, '
        '"relu2" ReLU squared; "swiglu" is gated',
        stock={GPT2: UNGATED, LLAMA: GATED, ARCEE: UNGATED, QWEN3: GATED, NANOCHAT: UNGATED},
        keys=named("activation_function", "hidden_act"),
        keys_note="values are other words there: " + ", ".join(f"{ours} is {word}" for ours, word in _RENAMED.items()),
        says=lambda config, _: STOCK_ACTIVATIONS[config.activation],
        card=lambda config, _: ("MLP", f"{ACTIVATION_WORDS[config.activation]}, hidden width {config.hidden_width:,}"),
    )
    mlp_width: int | None = option(  # M
        checks.optional(checks.integer(1, 1 << 24)),
        None,
        meaning="hidden width of the MLP; null: 4 emb_dim; with SwiGLU, 8/3 emb_dim makes up for its third matrix",
        names="intermediate_dim",
        stock=EVERY,
        keys=named("n_inner", "intermediate_size"),
        says=lambda config, stock: config.mlp_width if stock == GPT2 else config.hidden_width,
        divided="hidden_width",
    )
    biases: bool = option(  # missing ones are zeros in the classes
        checks.boolean(),
        True,
        meaning="biases of LayerNorms and of all linear layers, except those of queries, keys and values: qkv_bias",
        stock={GPT2: None, LLAMA: None, ARCEE: None, QWEN3: (False,), NANOCHAT: (False,)},
        keys=dict.fromkeys((LLAMA, ARCEE), ("mlp_bias",)),
        card=lambda config, _: ("biases", BIASES[config.qkv_bias, config.biases]),
    )
    norm: str = option(
        checks.one_of("layernorm", "rmsnorm"),
        "layernorm",
        meaning='"rmsnorm" subtracts no mean and has no bias',
        stock=dict.fromkeys(ROTARY, ("rmsnorm",)),
        card=lambda config, _: ("norm", {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[config.norm] + config.no_gain),
    )
    norm_gain: bool = option(  # ones in the classes that have gains
        checks.boolean(),
        True,
        meaning="false: norms have no learned gain and no bias",
        stock={**EVERY, NANOCHAT: (False,)},
    )
    norm_eps: float = option(
        checks.number(0.0, 1.0, above=True),
        1e-5,
        meaning="number that norms add to the variance under the square root",
        stock=EVERY,
        keys=named("layer_norm_epsilon", "rms_norm_eps"),
    )
    positions: str = option(
        checks.one_of("learned", "rope"),
        "learned",
        meaning='"learned": embeddings of the positions; "rope": queries and keys are rotated by an angle that grows '
        "with the position",
        stock=dict.fromkeys(ROTARY, ("rope",)),
        card=lambda config, _: (
            "positions",
            "learned" if config.positions == "learned" else f"rotary (RoPE), base {config.rope_base:g}",
        ),
    )
    rope_base: float = option(
        checks.number(1.0, above=True),
        10_000.0,
        meaning="base of the frequencies of RoPE's angles; larger for long contexts",
        stock=EVERY,
        keys=named("", "rope_theta"),
    )
    n_kv_heads: int | None = option(  # K
        checks.optional(checks.integer(1, 1 << 20)),
        None,
        meaning="number of heads of keys and values, a divisor of n_heads: groups of queries share them; null: n_heads",
        names="n_kv_head num_kv_heads",
        stock=dict.fromkeys(ROTARY),
        keys=named("", "num_key_value_heads"),
        says=lambda config, _: config.kv_heads,
        card=lambda config, _: config.n_kv_heads and ("heads of keys and values", str(config.n_kv_heads)),
        divided="kv_heads",
    )
    qk_norm: bool = option(
        checks.boolean(),
        False,
        meaning="RMSNorm of each head's queries and keys, before they are rotated",
        stock={QWEN3: (True,), NANOCHAT: (True,)},
        card=lambda config, _: config.qk_norm and ("queries and keys", f"normalized by RMSNorm{config.no_gain}"),
    )
    scale_attention_by_inverse_layer: bool = option(
        checks.boolean(),
        False,
        meaning="divide attention scores by the number of the layer, counted from 1",
        stock={GPT2: None},
        keys={GPT2: ("scale_attn_by_inverse_layer_idx",)},
        says=lambda config, _: config.scale_attention_by_inverse_layer or attrs.NOTHING,
        card=lambda config, _: (
            config.scale_attention_by_inverse_layer
            and ("attention scores", "divided by the number of the layer, from 1")
        ),
    )
    embedding_norm: bool = option(  # folded into the table for classes that lack it
        checks.boolean(),
        False,
        meaning="norm of the token embedding, before positions are added",
        stock={**EVERY, NANOCHAT: (True,)},
        card=lambda config, stock: config.embedding_norm and ("token embedding", _normalized(config, stock)),
    )
    logit_softcap: float | None = option(
        checks.optional(checks.number(0.0, above=True)),
        None,
        meaning="a number c: logits are c tanh(z / c); null: logits are not capped",
        stock={NANOCHAT: None},
        keys={NANOCHAT: ("final_logit_softcapping",)},
        card=lambda config, _: config.logit_softcap and ("logits", f"soft-capped by tanh at {config.logit_softcap:g}"),
    )
    zero_init_projections: bool = option(
        checks.boolean(),
        False,
        meaning="the attention output and the last matrix of the MLP begin at zero",
        stock=EVERY,
    )
    zero_init_head: bool = option(checks.boolean(), False, meaning="the untied output head begins at zero", stock=EVERY)

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
