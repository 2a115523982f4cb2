"""Check the files in a model's directory.

The files that describe the network must not contradict each other. A note lists the weight files that are not read.
If it is unclear which weights are the model's, the directory is refused.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import BadInput
from common.json_files import read_json
from common.output import note, show
from common.text import quoted
from model.config import GPT2, OUR_ACTIVATIONS, ModelConfig, rows
from training.checkpoints.directory import WEIGHTS

INDEX = f"{WEIGHTS}.index.json"  # lists the tensors of weights that are split over several files
NANOGPT = "ckpt.pt"
# Files that state the number of heads: those of Hugging Face, of gpjt (runs and published models), and of OpenAI.
CONFIG_FILES = ("config.json", "model.json", "hparams.json")
ORIGINAL_CONFIG = "params.json"  # Meta's; the network is not built from it, but it must not contradict the other files
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json")
# Patterns for files in a model's directory that may contain weights. A note lists those that are not read.
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "model.ckpt*")
OPTIONS = rows(ModelConfig)
FACT_KEYS = (
    *("n_heads", "n_kv_heads", "n_layers", "emb_dim", "context_length", "vocab_size"),
    *("norm_eps", "rope_base", "tie_weights"),
)
# Facts about a network: our key, and the keys by which different programs state the same fact.
FACTS = {
    **{name: (*OPTIONS[name].file_keys, name) for name in FACT_KEYS},
    "activation": (*OPTIONS["activation"].keys[GPT2], "activation"),
}


def check_model_files(path: Path, run: Path | None) -> None:
    """Raise BadInput if files in a model's directory contradict each other, and print a note on unread weights.

    `run`: the run directory that the model belongs to, or None. The files must also agree with the run's model.json.
    """
    configs = [path / name for name in (*CONFIG_FILES, ORIGINAL_CONFIG)]
    configs += [] if run is None else [run / "model.json"]
    check_facts((file, inner_config(read_json(file))) for file in dict.fromkeys(configs) if file.is_file())
    read = set(weight_files(path))
    if (path / INDEX).is_file() and (path / WEIGHTS).is_file() and WEIGHTS not in read:
        raise BadInput(
            f"{path}: {WEIGHTS} and the files listed in {INDEX} both contain the weights; delete one or the other"
        )
    for name in ADAPTERS:
        if (path / name).is_file():
            raise BadInput(
                f"{path / name}: adapters are not applied; merge this one into the weights, or move it elsewhere"
            )
    shards = [file.name for file in path.glob("model-*-of-*.safetensors") if file.name not in read]
    if shards and (path / INDEX).is_file():
        raise BadInput(f"{path / min(shards)}: not listed in {INDEX}; delete it, or download the model again")
    unread = sorted({file.name for pattern in OTHER_WEIGHTS for file in path.glob(pattern)} - read)
    if unread and read:
        more = f" and {len(unread) - 1:,} more" if len(unread) > 1 else ""
        show(
            note(f"{path}: reading {min(read)}; this folder's other weight files are ignored: {unread[0]}{more}"),
            once=True,
        )


def weight_files(path: Path) -> list[str]:
    """Return the names of the files that contain a model's weights. Raises BadInput for a damaged index."""
    if (path / INDEX).is_file():
        places = read_json(path / INDEX).get("weight_map")
        names = sorted({str(name) for name in places.values()}) if isinstance(places, dict) else []
        if any(Path(name).name != name for name in names) or not names:
            raise BadInput(f"{path / INDEX}: damaged: wanted weight_map with the names of files in the same folder")
        return names
    return [WEIGHTS] if (path / WEIGHTS).is_file() or not (path / NANOGPT).is_file() else [NANOGPT]


def check_facts(configs: Iterable[tuple[Path, dict[str, Any]]]) -> None:
    """Raise BadInput if two keys, in the same file or in different files, state different values for the same fact."""
    stated: dict[str, tuple[Path, str, Any]] = {}  # by fact: where it was stated first
    for file, values in configs:
        for fact, keys in FACTS.items():
            for key in keys:
                value = values.get(key)
                value = OUR_ACTIVATIONS.get(value, value) if isinstance(value, str) else value
                if value is None or value == -1:  # with -1, Meta's files leave the vocabulary size to the tokenizer
                    continue
                first_file, first_key, first_value = stated.setdefault(fact, (file, key, value))
                if value != first_value:
                    statement = f"{first_key}: {quoted(first_value)}"
                    if first_file != file:
                        statement = f"{first_file.name} has {statement}"
                    raise BadInput(
                        f"{file}: {key}: got {quoted(value)}, but {statement}; correct or delete one of them"
                    )


def inner_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration in the content of a file. In gpjt's published models, it is the object under "cfg"."""
    inside = values.get("cfg")
    return inside if isinstance(inside, dict) else values
