"""Files that describe one network: two of them must agree, and weights that are not read are named or refused."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import BadInput
from common.json_files import read_json
from common.output import note, show
from common.text import quoted
from model.config import GPT2, OUR_ACTIVATIONS, ModelConfig, rows
from training.checkpoints.directory import WEIGHTS

INDEX = f"{WEIGHTS}.index.json"  # of weights in several files
NANOGPT = "ckpt.pt"
# Files with the number of heads: Hugging Face's, gpjt's (run directories and published models), OpenAI's.
CONFIG_FILES = ("config.json", "model.json", "hparams.json")
ORIGINAL_CONFIG = "params.json"  # Meta's, which is not read, but may contradict the others
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json")
# Names of other weights in a model's directory.
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "model.ckpt*")
OPTIONS = rows(ModelConfig)
FACT_KEYS = (
    *("n_heads", "n_kv_heads", "n_layers", "emb_dim", "context_length", "vocab_size"),
    *("norm_eps", "rope_base", "tie_weights"),
)
# Each fact about a network, by our key, and the keys of different programs that state it.
FACTS = {
    **{name: (*OPTIONS[name].file_keys, name) for name in FACT_KEYS},
    "activation": (*OPTIONS["activation"].keys[GPT2], "activation"),
}


def check_model_files(path: Path, run: Path | None) -> None:
    """Raise BadInput where two files of a model's directory describe one network differently; note unread weights."""
    configs = [path / name for name in (*CONFIG_FILES, ORIGINAL_CONFIG)]
    configs += [] if run is None else [run / "model.json"]
    check_facts((file, inner_config(read_json(file))) for file in dict.fromkeys(configs) if file.is_file())
    read = set(weight_files(path))
    if (path / INDEX).is_file() and (path / WEIGHTS).is_file() and WEIGHTS not in read:
        raise BadInput(
            f"{path}: {WEIGHTS} and the files of {INDEX} both hold the weights; keep one of them, and delete the other"
        )
    for name in ADAPTERS:
        if (path / name).is_file():
            raise BadInput(
                f"{path / name}: an adapter, which is not applied; merge it into the weights, or move it away"
            )
    shards = [file.name for file in path.glob("model-*-of-*.safetensors") if file.name not in read]
    if shards and (path / INDEX).is_file():
        raise BadInput(f"{path / min(shards)}: is not in {INDEX}; delete it, or download the model again")
    others = sorted({file.name for pattern in OTHER_WEIGHTS for file in path.glob(pattern)} - read)
    if others and read:
        more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
        show(note(f"{path}: reads {min(read)}; other weights next to it are not read: {others[0]}{more}"), once=True)


def weight_files(path: Path) -> list[str]:
    """Return the names of the files that hold a model's weights. Raises BadInput for a damaged index."""
    if (path / INDEX).is_file():
        places = read_json(path / INDEX).get("weight_map")
        names = sorted({str(name) for name in places.values()}) if isinstance(places, dict) else []
        if any(Path(name).name != name for name in names) or not names:
            raise BadInput(f"{path / INDEX}: damaged: wanted weight_map with the names of files beside it")
        return names
    return [WEIGHTS] if (path / WEIGHTS).is_file() or not (path / NANOGPT).is_file() else [NANOGPT]


def check_facts(configs: Iterable[tuple[Path, dict[str, Any]]]) -> None:
    """Raise BadInput where two keys, of one file or of several, state one fact of a network differently."""
    stated: dict[str, tuple[Path, str, Any]] = {}
    for file, values in configs:
        for fact, keys in FACTS.items():
            for key in keys:
                value = values.get(key)
                value = OUR_ACTIVATIONS.get(value, value) if isinstance(value, str) else value
                if value is None or value == -1:  # Meta's files leave the vocabulary to the tokenizer
                    continue
                before, name, known = stated.setdefault(fact, (file, key, value))
                if value != known:
                    other = (
                        f"{name}: {quoted(known)}" if before == file else f"{before.name} has {name}: {quoted(known)}"
                    )
                    raise BadInput(f"{file}: {key}: got {quoted(value)}, but {other}; correct or delete one of them")


def inner_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration in a file's values; gpjt's published models have it under a key."""
    inside = values.get("cfg")
    return inside if isinstance(inside, dict) else values
