"""Model configuration (model.json): shape and options of a network, its parameter count and FLOPs.

C embedding width, H heads, K key-value heads, D head width (C = H * D), L layers, M MLP width, T context length,
V vocabulary size. Each option defaults to GPT-2; docs/architecture.md has their sources.
"""

import attrs

from common import checks

INITIAL_STD = 0.02  # linear and token-embedding weights, as in OpenAI's model.py
VOCABULARY_MULTIPLE = 128  # rows of the embedding in memory: matmuls over 50,304 rows are faster than over 50,257

GATED = ("swiglu",)  # activations of an MLP with a third matrix, its gate
ACTIVATIONS = ("gelu_tanh", "gelu", "relu2", *GATED)  # GPT-2's, the exact one, ReLU squared


@attrs.frozen(kw_only=True)
class ModelConfig:
    """The fields of `model.json`. Spellings are those of gpjt/ddp-base-model-from-scratch."""

    vocab_size: int = attrs.field(validator=checks.integer(2, 1 << 24))  # token ids are 0 .. vocab_size - 1
    context_length: int = attrs.field(validator=checks.integer(1, 1 << 24))  # T, tokens
    emb_dim: int = attrs.field(validator=checks.integer(1, 1 << 20))  # C
    n_heads: int = attrs.field(validator=checks.integer(1, 1 << 20))  # H; head width is C / H
    n_layers: int = attrs.field(validator=checks.integer(1, 10_000))  # L
    drop_rate: float = attrs.field(default=0.0, validator=checks.number(0.0, 0.99))
    qkv_bias: bool = attrs.field(default=False, validator=checks.boolean())
    tie_weights: bool = attrs.field(default=False, validator=checks.boolean())  # output head = token embedding
    activation: str = attrs.field(default="gelu_tanh", validator=checks.one_of(*ACTIVATIONS))  # in the MLP
    mlp_width: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(1, 1 << 24)))  # M; 4 C
    biases: bool = attrs.field(default=True, validator=checks.boolean())  # of all other linear layers and LayerNorms
    norm: str = attrs.field(default="layernorm", validator=checks.one_of("layernorm", "rmsnorm"))
    norm_gain: bool = attrs.field(default=True, validator=checks.boolean())  # false: norms have no parameters
    norm_eps: float = attrs.field(default=1e-5, validator=checks.number(0.0, 1.0, above=True))
    positions: str = attrs.field(default="learned", validator=checks.one_of("learned", "rope"))
    rope_base: float = attrs.field(default=10_000.0, validator=checks.number(1.0, above=True))
    n_kv_heads: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(1, 1 << 20)))  # K; H
    qk_norm: bool = attrs.field(default=False, validator=checks.boolean())  # RMSNorm of each query and key
    scale_attention_by_inverse_layer: bool = attrs.field(default=False, validator=checks.boolean())  # 1 / layer, from 1
    embedding_norm: bool = attrs.field(default=False, validator=checks.boolean())  # of the token embedding
    logit_softcap: float | None = attrs.field(default=None, validator=checks.optional(checks.number(0.0, above=True)))
    zero_init_projections: bool = attrs.field(default=False, validator=checks.boolean())  # back to the residual stream
    zero_init_head: bool = attrs.field(default=False, validator=checks.boolean())

    def __attrs_post_init__(self) -> None:
        if self.emb_dim % self.n_heads:
            raise ValueError(f"emb_dim: got {self.emb_dim}, wanted a multiple of n_heads, {self.n_heads}")
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_kv_heads: got {self.n_kv_heads}, wanted a divisor of n_heads, {self.n_heads}")
        if self.positions == "rope" and self.head_width % 2:
            raise ValueError(
                f'positions: got "rope" with heads of width {self.head_width}, wanted an even emb_dim / n_heads: it '
                "rotates pairs"
            )
        if self.zero_init_head and self.tie_weights:
            raise ValueError(
                "zero_init_head: got true, wanted false, because tie_weights is true: the head is the token embedding"
            )
        checks.set_one_form(self, n_kv_heads=self.n_heads, mlp_width=4 * self.emb_dim)

    @property
    def head_width(self) -> int:
        """D."""
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

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding in memory; checkpoints hold the first `vocab_size` of them."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def parameter_count(config: ModelConfig) -> int:
    """Return the number of trained parameters: padding not counted, tied weights counted once."""
    width, vocabulary = config.emb_dim, config.vocab_size * config.emb_dim
    norm = width * config.norm_gain * (2 if config.norm == "layernorm" and config.biases else 1)
    qk_norms = 2 * config.head_width * config.qk_norm * config.norm_gain
    mlp_rows = config.hidden_width * (2 if config.activation in GATED else 1) + width
    biases = config.qkv_width * config.qkv_bias + (width + mlp_rows) * config.biases
    outer = norm * (1 + config.embedding_norm) + vocabulary * (not config.tie_weights)
    positions = config.context_length * width * (config.positions == "learned")
    return vocabulary + positions + config.n_layers * (_block_matrices(config) + biases + 2 * norm + qk_norms) + outer


def matmul_parameter_count(config: ModelConfig) -> int:
    """Return the number of weights in matrix products: those of the blocks, GPT-2's 12 C^2, and the head's V x C."""
    return config.n_layers * _block_matrices(config) + config.vocab_size * config.emb_dim


def flops_per_token(config: ModelConfig) -> int:
    """Return FLOPs of forward and backward for one token: 6 N + 12 L C T.

    PaLM (arXiv 2204.02311), appendix B, with N the matmul parameters; causal masking is not credited.
    """
    attention = 12 * config.n_layers * config.emb_dim * config.context_length
    return 6 * matmul_parameter_count(config) + attention


GPT2_SMALL = ModelConfig(
    vocab_size=50257, context_length=1024, emb_dim=768, n_heads=12, n_layers=12, qkv_bias=True, tie_weights=True
)
GPT2_SIZES = {  # Radford et al. 2019, table 2, as released by OpenAI
    "124M": GPT2_SMALL,
    "350M": attrs.evolve(GPT2_SMALL, emb_dim=1024, n_heads=16, n_layers=24),
    "774M": attrs.evolve(GPT2_SMALL, emb_dim=1280, n_heads=20, n_layers=36),
    "1.5B": attrs.evolve(GPT2_SMALL, emb_dim=1600, n_heads=25, n_layers=48),
}


def _block_matrices(config: ModelConfig) -> int:
    """Return the weights of a block's matrices: queries, keys and values, attention output, MLP."""
    mlp = (3 if config.activation in GATED else 2) * config.hidden_width
    return config.emb_dim * (config.qkv_width + config.emb_dim + mlp)
