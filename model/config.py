"""Model configuration (model.json): shape and options of a network.

C embedding width, H heads, K key-value heads, D head width (C = H * D), L layers, M MLP width, T context length,
V vocabulary size. By default, every option has GPT-2's value; docs/architecture.md has the sources of all other values.

Each option is one field of ModelConfig. The field's row has the option's default and check, its meaning, its names in
other programs, its keys in the stock classes of Hugging Face transformers, and its text for the model card. The network
itself is in gpt.py. Parameters, bytes and all FLOPs except those of attention are counted on the network itself.
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from common import checks
from common.checks import ValueCheck, key_field
from common.errors import InvalidValue, Problem

# Stock classes, by their `model_type`
GPT2, LLAMA, ARCEE, QWEN3, NANOCHAT = "gpt2", "llama", "arcee", "qwen3", "nanochat"
ROTARY = (LLAMA, ARCEE, QWEN3, NANOCHAT)  # the classes with RoPE; they have the same keys in config.json
ALL_CLASSES: dict[str, None] = dict.fromkeys((GPT2, *ROTARY))  # the `stock` of an option that all classes support
NANOGPT_KEYS = "nanogpt"  # the entry for nanoGPT's checkpoints in the table that `keys_by_program` returns

INITIAL_STD = 0.02  # standard deviation of linear and token-embedding weights, as in OpenAI's model.py
# In memory, the embedding's number of rows is a multiple of this, because matmuls are faster over 50,304 rows than over
# 50,257.
VOCABULARY_MULTIPLE = 128

GATED = ("swiglu",)  # with these activations, the MLP has a third matrix, the gate
# Activations of the MLP, with their descriptions in a model card
ACTIVATION_WORDS = {
    "gelu_tanh": "GELU, approximated by tanh",
    "gelu": "exact GELU",
    "relu2": "squared ReLU",
    "swiglu": "SwiGLU",
}
# The names of these activations in transformers
STOCK_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu2": "relu2", "swiglu": "silu"}
_RENAMED_ACTIVATIONS = {name: stock_name for name, stock_name in STOCK_ACTIVATIONS.items() if name != stock_name}
# Name in transformers -> our name. In transformers, gelu_tanh has two names.
OUR_ACTIVATIONS = {stock_name: name for name, stock_name in STOCK_ACTIVATIONS.items()} | {
    "gelu_pytorch_tanh": "gelu_tanh"
}
UNGATED = tuple(name for name in ACTIVATION_WORDS if name not in GATED)
# The model card's description of biases, by qkv_bias and `biases`. The exported file has zeros for missing biases.
BIASES = {
    (True, True): "all",
    (True, False): "of queries, keys and values",
    (False, True): "all; the biases of queries, keys and values are zeros",
    (False, False): "none; if the class has biases, they are zeros",
}


@attrs.frozen(kw_only=True)
class ArchitectureOption:
    """What an option of the network declares in addition to its KeyRow. A key of train.json has only a KeyRow.

    In the comments, `config` is a ModelConfig.
    """

    # Stock class -> values that it supports; None means all values. A class that is missing supports only the default.
    stock: Mapping[str, tuple[Any, ...] | None] = attrs.field(factory=dict)
    # Stock class or other program -> this option's keys in that class's config.json or that program's model file
    keys: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    # (config, stock class) -> value of these keys, or attrs.NOTHING to leave them out. None means the field's value.
    stock_value: Callable[[Any, str], Any] | None = None
    card: Callable[[Any, str], tuple[str, str] | None] | None = None  # (config, stock class) -> row of the model card
    divided: str | None = None  # attribute of ModelConfig; its value is divided equally among tensor shards

    @property
    def file_keys(self) -> tuple[str, ...]:
        """This option's names in the model files of all other programs."""
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
    """Return a field of ModelConfig with its two rows: a KeyRow, and an ArchitectureOption with the arguments `row`.

    If a user writes the name that another program uses for this option, the error message suggests this option. The
    recognized names are the option's keys in other programs' model files, and `names`, which other programs use only
    on command lines. If the values in those model files differ from ours, `keys_note` explains the difference.
    """
    architecture = ArchitectureOption(**row)
    file_keys = " ".join(architecture.file_keys)
    foreign: dict[str, Any] = {"names": f"{file_keys} {names}"}
    if keys_note:
        foreign = {"names": names, "similar": {keys_note: file_keys}}
    return key_field(check, default, metadata={ArchitectureOption: architecture}, meaning=meaning, **foreign)


def rows(config_class: Any) -> dict[str, ArchitectureOption]:
    """Return the row of each option, by key. Fields without a row are left out."""
    fields = attrs.fields(config_class)
    return {field.name: field.metadata[ArchitectureOption] for field in fields if ArchitectureOption in field.metadata}


def stock_keys(kind: str) -> dict[str, str]:
    """Return the key of each option in a stock class's config.json.

    If several keys have the value of an option, the first of them is returned.
    """
    return {name: row.keys[kind][0] for name, row in rows(ModelConfig).items() if row.keys.get(kind)}


def keys_by_program(gpt2: str, rotary: str, **programs: str) -> dict[str, tuple[str, ...]]:
    """Return an option's keys in model files, by stock class or program. Each argument has keys separated by spaces.

    `rotary` has the keys of all classes with RoPE. The names of `programs` may be `nanogpt` (for its checkpoints),
    `openai` (hparams.json) and `meta` (params.json). A program's key need not be repeated if GPT2's config.json also
    has it.
    """
    keys = {GPT2: gpt2, **dict.fromkeys(ROTARY, rotary), **programs}
    return {program: tuple(names.split()) for program, names in keys.items()}


@attrs.frozen(kw_only=True)
class ModelConfig:
    """The keys of `model.json`, each with its row. They have the same names as in gpjt/ddp-base-model-from-scratch."""

    vocab_size: int = option(
        checks.integer(2, 1 << 24),
        meaning="size of the vocabulary; token ids are 0 to vocab_size - 1",
        stock=ALL_CLASSES,
        keys=keys_by_program("vocab_size", "vocab_size", openai="n_vocab"),
        divided="padded_vocab_size",
    )
    context_length: int = option(  # T
        checks.integer(1, 1 << 24),
        meaning="number of tokens that the network sees at once",
        names="max_seq_len seq_len",
        stock=ALL_CLASSES,
        keys=keys_by_program("n_positions n_ctx", "max_position_embeddings", nanogpt="block_size"),
        card=lambda config, _: ("context", f"{config.context_length:,} tokens"),
        divided="context_length",
    )
    emb_dim: int = option(  # C
        checks.integer(1, 1 << 20),
        meaning="width of the network; a multiple of n_heads",
        names="d_model hidden_dim",
        stock=ALL_CLASSES,
        keys=keys_by_program("n_embd", "hidden_size", meta="dim"),
    )
    n_heads: int = option(  # H; the head width is C / H
        checks.integer(1, 1 << 20),
        meaning="number of attention heads",
        names="num_heads",
        stock=ALL_CLASSES,
        keys=keys_by_program("n_head", "num_attention_heads"),
        divided="n_heads",
    )
    n_layers: int = option(  # L
        checks.integer(1, 10_000),
        meaning="number of blocks",
        names="num_layers",
        stock=ALL_CLASSES,
        keys=keys_by_program("n_layer", "num_hidden_layers"),
        card=lambda config, _: ("layers, heads, width", f"{config.n_layers}, {config.n_heads}, {config.emb_dim}"),
    )
    drop_rate: float = option(  # the classes with RoPE have dropout only in attention
        checks.number(0.0, 0.99),
        0.0,
        meaning="dropout rate of embeddings, attention and residual branches",
        stock=ALL_CLASSES,
        keys=keys_by_program("attn_pdrop embd_pdrop resid_pdrop", "attention_dropout", nanogpt="dropout"),
    )
    qkv_bias: bool = option(  # for biases that a network lacks, the export writes zeros
        checks.boolean(),
        False,
        meaning="true: queries, keys and values have biases, as in GPT-2",
        stock=ALL_CLASSES,
        keys=keys_by_program("", "attention_bias", nanogpt="bias"),
        keys_note="for queries, keys and values; model.biases sets all other biases",
        stock_value=lambda config, _: config.qkv_bias or config.biases,
    )
    tie_weights: bool = option(
        checks.boolean(),
        False,
        meaning="true: use the token embedding as the output head, as GPT-2 does",
        stock=ALL_CLASSES,
        keys=keys_by_program("tie_word_embeddings", "tie_word_embeddings"),
        stock_value=lambda config, stock: config.tie_weights and not config.folds_embedding_norm(stock),
        card=lambda config, _: ("output head", "the token embedding" if config.tie_weights else "separate weights"),
    )
    activation: str = option(
        checks.one_of(*ACTIVATION_WORDS),
        "gelu_tanh",
        meaning='activation of the MLP; "gelu_tanh": GPT-2\'s tanh approximation of GELU; "gelu": nanoGPT\'s exact '
        'GELU; "relu2": ReLU squared; "swiglu": a gated MLP with a third matrix',
        stock={GPT2: UNGATED, LLAMA: GATED, ARCEE: UNGATED, QWEN3: GATED, NANOCHAT: UNGATED},
        keys=keys_by_program("activation_function", "hidden_act"),
        keys_note="whose values have other names: "
        + ", ".join(f"{name} is their {stock_name}" for name, stock_name in _RENAMED_ACTIVATIONS.items()),
        stock_value=lambda config, _: STOCK_ACTIVATIONS[config.activation],
        card=lambda config, _: ("MLP", f"{ACTIVATION_WORDS[config.activation]}, hidden width {config.hidden_width:,}"),
    )
    mlp_width: int | None = option(  # M
        checks.optional(checks.integer(1, 1 << 24)),
        None,
        meaning="hidden width of the MLP; null: 4 emb_dim; with SwiGLU, 8/3 emb_dim compensates for the third matrix",
        names="intermediate_dim",
        stock=ALL_CLASSES,
        keys=keys_by_program("n_inner", "intermediate_size"),
        stock_value=lambda config, stock: config.mlp_width if stock == GPT2 else config.hidden_width,
        divided="hidden_width",
    )
    biases: bool = option(  # for biases that a network lacks, the export writes zeros
        checks.boolean(),
        True,
        meaning="true: LayerNorms and all linear layers have biases; qkv_bias decides this for queries, keys and "
        "values",
        stock={GPT2: None, LLAMA: None, ARCEE: None, QWEN3: (False,), NANOCHAT: (False,)},
        keys=dict.fromkeys((LLAMA, ARCEE), ("mlp_bias",)),
        card=lambda config, _: ("biases", BIASES[config.qkv_bias, config.biases]),
    )
    norm: str = option(
        checks.one_of("layernorm", "rmsnorm"),
        "layernorm",
        meaning='type of the norms; "rmsnorm" does not subtract the mean and has no bias',
        stock=dict.fromkeys(ROTARY, ("rmsnorm",)),
        card=lambda config, _: ("norm", {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[config.norm] + config.no_gain),
    )
    norm_gain: bool = option(  # for gains that a network lacks, the export writes ones
        checks.boolean(),
        True,
        meaning="true: norms have a learned gain; false: norms have no gain and no bias",
        stock={**ALL_CLASSES, NANOCHAT: (False,)},
    )
    norm_eps: float = option(
        checks.number(0.0, 1.0, above=True),
        1e-5,
        meaning="epsilon of the norms, which is added to the variance under the square root",
        stock=ALL_CLASSES,
        keys=keys_by_program("layer_norm_epsilon", "rms_norm_eps"),
    )
    positions: str = option(
        checks.one_of("learned", "rope"),
        "learned",
        meaning='"learned": position embeddings; "rope": queries and keys are rotated by an angle that grows with the '
        "position",
        stock=dict.fromkeys(ROTARY, ("rope",)),
        card=lambda config, _: (
            "positions",
            "learned" if config.positions == "learned" else f"rotary (RoPE), base {config.rope_base:g}",
        ),
    )
    rope_base: float = option(
        checks.number(1.0, above=True),
        10_000.0,
        meaning="base of RoPE's rotation frequencies; long contexts need a larger base",
        stock=ALL_CLASSES,
        keys=keys_by_program("", "rope_theta"),
    )
    n_kv_heads: int | None = option(  # K
        checks.optional(checks.integer(1, 1 << 20)),
        None,
        meaning="number of key-value heads, a divisor of n_heads; each one serves a group of query heads; null: "
        "n_heads",
        names="n_kv_head num_kv_heads",
        stock=dict.fromkeys(ROTARY),
        keys=keys_by_program("", "num_key_value_heads"),
        stock_value=lambda config, _: config.kv_heads,
        card=lambda config, _: config.n_kv_heads and ("heads of keys and values", str(config.n_kv_heads)),
        divided="kv_heads",
    )
    qk_norm: bool = option(
        checks.boolean(),
        False,
        meaning="true: apply RMSNorm to the queries and keys of each head before they are rotated",
        stock={QWEN3: (True,), NANOCHAT: (True,)},
        card=lambda config, _: config.qk_norm and ("queries and keys", f"normalized by RMSNorm{config.no_gain}"),
    )
    scale_attention_by_inverse_layer: bool = option(
        checks.boolean(),
        False,
        meaning="true: divide attention scores by the layer's number, counted from 1",
        stock={GPT2: None},
        keys={GPT2: ("scale_attn_by_inverse_layer_idx",)},
        stock_value=lambda config, _: config.scale_attention_by_inverse_layer or attrs.NOTHING,
        card=lambda config, _: (
            config.scale_attention_by_inverse_layer
            and ("attention scores", "divided by the layer's number, counted from 1")
        ),
    )
    embedding_norm: bool = option(  # if a class has no such norm, the export normalizes the embedding table
        checks.boolean(),
        False,
        meaning="true: normalize the token embedding before positions are added",
        stock={**ALL_CLASSES, NANOCHAT: (True,)},
        card=lambda config, stock: config.embedding_norm and ("token embedding", _normalized(config, stock)),
    )
    logit_softcap: float | None = option(
        checks.optional(checks.number(0.0, above=True)),
        None,
        meaning="a number c caps the logits: each logit z becomes c tanh(z / c); null: logits are not capped",
        stock={NANOCHAT: None},
        keys={NANOCHAT: ("final_logit_softcapping",)},
        card=lambda config, _: config.logit_softcap and ("logits", f"soft-capped by tanh at {config.logit_softcap:g}"),
    )
    zero_init_projections: bool = option(
        checks.boolean(),
        False,
        meaning="true: initialize the attention's output matrix and the MLP's last matrix with zeros",
        stock=ALL_CLASSES,
    )
    zero_init_head: bool = option(
        checks.boolean(), False, meaning="true: initialize the untied output head with zeros", stock=ALL_CLASSES
    )

    def __attrs_post_init__(self) -> None:
        if self.emb_dim % self.n_heads:
            raise _contradiction("emb_dim", self.emb_dim, f"a multiple of n_heads, {self.n_heads}", "n_heads")
        if self.n_heads % self.kv_heads:
            raise _contradiction("n_kv_heads", self.n_kv_heads, f"a divisor of n_heads, {self.n_heads}", "n_heads")
        if self.positions == "rope" and self.head_width % 2:
            value, expected = f'"rope" with heads of width {self.head_width}', "an even emb_dim / n_heads"
            cause = "RoPE rotates pairs of elements"
            raise _contradiction("positions", value, expected, "emb_dim", "n_heads", cause=cause)
        if self.zero_init_head and self.tie_weights:
            expected, cause = "false, because tie_weights is true", "the output head is the token embedding"
            raise _contradiction("zero_init_head", "true", expected, "tie_weights", cause=cause)
        checks.set_one_form(self, n_kv_heads=self.n_heads, mlp_width=4 * self.emb_dim)

    @property
    def head_width(self) -> int:
        return self.emb_dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads: K."""
        return self.n_kv_heads or self.n_heads

    @property
    def qkv_heads(self) -> tuple[int, int, int]:
        """Numbers of heads of queries, keys and values, in the order of the fused matrix: H, K, K."""
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
        """Return whether the export must fold the norm after the token embedding into the embedding table.

        It must do so if the network has this norm but the stock class does not.
        """
        return self.embedding_norm and stock != NANOCHAT

    @property
    def no_gain(self) -> str:
        return "" if self.norm_gain else ", without gain"

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the token embedding in memory. Checkpoints store only the first `vocab_size` rows."""
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
    """Return all possible numbers of tensor shards."""
    return [shards for shards in range(1, config.n_heads + 1) if not indivisible_sizes(config, shards)]


def indivisible_sizes(config: ModelConfig, shards: int) -> dict[str, int]:
    """Return the sizes that this number of tensor shards does not divide. The keys are their names in ModelConfig."""
    names = [row.divided for row in rows(type(config)).values() if row.divided]
    # If there are fewer key-value heads than shards, each head is copied to several shards.
    copied = "kv_heads" if shards % config.kv_heads == 0 else None
    return {name: getattr(config, name) for name in names if getattr(config, name) % shards and name != copied}


def _contradiction(key: str, value: object, expected: str, *other_keys: str, cause: str = "") -> InvalidValue:
    return InvalidValue(Problem(key=key, found=str(value), expected=expected, cause=cause, other_keys=other_keys))


def _normalized(config: ModelConfig, stock: str) -> str:
    if not config.folds_embedding_norm(stock):
        return "normalized"
    head = "; the output head uses the original table, which is not normalized" if config.tie_weights else ""
    return f"normalized in training; here, the table is already normalized{head}"
