"""nanoGPT's train.py: a copy in a folder of its own, over random tokens."""

import pickle
import sys
from pathlib import Path

import attrs
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.errors import BadInput  # after the path to it
from model.config import ModelConfig

# On a CPU nanoGPT computes in fp32 whatever --dtype says: this is why. Without it the copy does what is asked.
CPU_CONDITION = "nullcontext() if device_type == 'cpu' else "
GELU, GPT2_GELU = "nn.GELU()", "nn.GELU(approximate='tanh')"  # nanoGPT's, with erf; GPT-2's, and ours
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@attrs.frozen(kw_only=True)
class NanogptSetting:
    """Shape, batch and precision of a nanoGPT run."""

    model: ModelConfig
    microbatch_size: int
    accumulation: int
    precision: str  # "fp32" or "bf16"
    compiled: bool
    gpt2_gelu: bool  # instead of its own


def prepare(clone: Path, setting: NanogptSetting, folder: Path) -> list[str]:
    """Put nanoGPT and random tokens into a folder; return the command. Raises BadInput where it is not nanoGPT."""
    names = ("train.py", "model.py", "configurator.py")
    missing = [name for name in names if not (clone / name).is_file()]
    if missing:
        raise BadInput(f"--beside-nanogpt {clone}: no {missing[0]} there; clone github.com/karpathy/nanoGPT")
    changes = {"train.py": (CPU_CONDITION, ""), "model.py": (GELU, GPT2_GELU if setting.gpt2_gelu else GELU)}
    for name in names:
        text = (clone / name).read_text()
        old, new = changes.get(name, ("", ""))
        if old and text.count(old) != 1:
            raise BadInput(f"--beside-nanogpt {clone}: {name} is not the one that is known; check out 3adf61e")
        (folder / name).write_text(text.replace(old, new))
    data = folder / "data" / "random"
    data.mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(0, setting.model.vocab_size, 1 << 20, dtype=np.uint16)
    for split in ("train", "val"):
        tokens.tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": setting.model.padded_vocab_size}))
    return [sys.executable, "train.py", *(f"--{key}={value}" for key, value in _options(setting).items())]


def _options(setting: NanogptSetting) -> dict[str, object]:
    model = setting.model
    return {
        "dataset": "random",
        "device": "cpu",
        "dtype": DTYPES[setting.precision],
        "compile": setting.compiled,
        "batch_size": setting.microbatch_size,
        "gradient_accumulation_steps": setting.accumulation,
        "block_size": model.context_length,
        "n_layer": model.n_layers,
        "n_head": model.n_heads,
        "n_embd": model.emb_dim,
        "bias": model.qkv_bias,
        "eval_iters": 1,
        "eval_interval": 10**9,
    }
