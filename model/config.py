"""Model configuration (model.json): the shape of a GPT-2 network, its parameter count and FLOPs.

C embedding width, L layers, T context length, V vocabulary size.
"""

import attrs

from model import checks

INITIAL_STD = 0.02  # linear and token-embedding weights, as in OpenAI's model.py
VOCABULARY_MULTIPLE = 128  # rows of the embedding in memory: matmuls over 50,304 rows are faster than over 50,257

ACTIVATIONS = {"gelu_tanh": "tanh", "gelu": "none"}  # GPT-2's, and the exact one; how torch approximates them


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

    def __attrs_post_init__(self) -> None:
        if self.emb_dim % self.n_heads:
            raise ValueError(f"emb_dim: got {self.emb_dim}, wanted a multiple of n_heads, {self.n_heads}")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding in memory; checkpoints hold the first `vocab_size` of them."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def parameter_count(config: ModelConfig) -> int:
    """Return the number of trained parameters: padding not counted, tied weights counted once."""
    width = config.emb_dim
    qkv = 3 * width * width + (3 * width if config.qkv_bias else 0)
    attention_output = width * width + width
    mlp = 8 * width * width + 5 * width
    norms = 4 * width
    block = qkv + attention_output + mlp + norms
    embeddings = (config.vocab_size + config.context_length) * width
    head = 0 if config.tie_weights else config.vocab_size * width
    return embeddings + config.n_layers * block + 2 * width + head


def matmul_parameter_count(config: ModelConfig) -> int:
    """Return the number of weights in matrix products: 12 C^2 a block, and the output head, V x C."""
    width = config.emb_dim
    return 12 * config.n_layers * width * width + config.vocab_size * width


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
