"""Export a model to a directory that Hugging Face's libraries load without remote code, and upload it to the hub."""

import filecmp
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.errors import BadInput, refusing
from common.files import PARTIAL, partial_directory, partial_of, publish_folder, replace_file, writing
from common.hub_client import CARD, HUB, check_logged_in, check_names, hub_errors, upload
from common.output import keep_logs_only, note, show
from evaluation.command_line import ExportCommand, SampleCommand
from evaluation.export.model_card import model_card
from evaluation.shared.chat_template import CONFIG, GENERATION
from evaluation.shared.load import Trained, load
from evaluation.shared.model_location import locate
from model.axes import unpadded
from model.gpt import GPT
from model.stock import stock_class
from model.stock_weights import to_stock
from tokens.tokenizer.hugging_face_files import write_tokenizer_files
from tokens.tokenizer.template import TEMPLATES
from tokens.tokenizer.tokenizer import END_OF_TEXT
from training.checkpoints.directory import WEIGHTS, is_own_partial
from training.telemetry.metrics_log import ANSWERS, EVALUATIONS

NOT_UPLOADED = (EVALUATIONS, ANSWERS)  # evaluation results that are stored next to the model but not uploaded
MODELFILE = "Modelfile"
# Default limit, in tokens, for the text that a pipeline of `transformers` generates. A short context lowers the limit.
LONGEST_GENERATION = 256
# Our templates in Go's template language, which ollama uses.
GO_TEMPLATES = {
    TEMPLATES["turns"].text: "{{ range .Messages }}<|{{ .Role }}|>{{ .Content }}<|end|>{{ end }}<|assistant|>",
    TEMPLATES["alpaca"].text: (
        "{{ if .System }}{{ .System }}{{ else }}Below is an instruction that describes a task. Write a response that "
        "appropriately completes the request.{{ end }}{{ range .Messages }}"
        '{{ if eq .Role "user" }}\n\n### Instruction:\n{{ .Content }}'
        '{{ else if eq .Role "assistant" }}\n\n### Response:\n{{ .Content }}<|endoftext|>{{ end }}'
        "{{ end }}\n\n### Response:\n"
    ),
}


def run(command: ExportCommand) -> None:
    keep_logs_only()
    repository = None if command.push is None else command.push.removeprefix(HUB)
    check_names(repository or "owner/name", command.license)
    if repository is not None:
        check_logged_in()
    trained = load(locate(command.model, command.checkpoint), command.tokenizer, torch.device("cpu"))
    export(trained, command.directory, repository, command.license, command.dtype)
    show(f"{command.directory}: exported; load it with AutoModelForCausalLM.from_pretrained")
    if repository is not None:
        show(push(command.directory, repository, private=command.private))


def export(
    trained: Trained, directory: Path, repository: str | None, license_name: str | None, dtype: str = "float32"
) -> None:
    """Write the directory atomically.

    If a `repository` is given and the directory already contains the same weights, the directory is left unchanged,
    because it may have been written by an earlier export whose push failed. Raises BadInput if the directory contains
    anything else, or if no stock class supports the network.
    """
    stock_class(trained.network.config, str(trained.location.path))
    directory = directory.resolve()
    for leftover in _other_partials(directory):
        show(note(f"{leftover}: an unfinished export; if no program is still writing it, delete it to free disk space"))
    contention = f"{directory}: another export is writing to this folder; wait for it, or pass another folder"
    with (
        refusing(f"{directory}: cannot be written", kinds=(SafetensorError,)),
        writing(directory),
        partial_directory(directory, contention) as partial,
    ):
        empty = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
        if not empty and (repository is None or not (directory / WEIGHTS).is_file()):
            raise BadInput(f"{directory}: exists; pass another folder, or delete it")
        if empty and directory.exists():
            directory.rmdir()  # this raises an error for a mount point, which could not be replaced by renaming
        _write_model(trained, partial, dtype)
        replace_file(partial / CARD, model_card(trained, repository or directory.name, license_name, dtype))
        if empty:
            publish_folder(partial, directory)
        elif not filecmp.cmp(directory / WEIGHTS, partial / WEIGHTS, shallow=False):
            raise BadInput(f"{directory}: contains other weights; pass another folder, or delete it")


def _other_partials(directory: Path) -> list[Path]:
    """Return the folders next to `directory` that contain partial exports to other directories.

    Folders that earlier versions wrote are included.
    """
    candidates = directory.parent.glob(f"{PARTIAL}*")
    signs = ("model", CONFIG, WEIGHTS, "tokenizer.json")  # an earlier version wrote into a folder "model"
    partials = [
        path for path in candidates if path != partial_of(directory) and any((path / sign).exists() for sign in signs)
    ]
    return sorted(path for path in partials if not is_own_partial(path))


def push(directory: Path, repository: str, *, private: bool) -> str:
    """Upload an exported directory, and return its URL. Raises BadInput if the upload fails."""
    from huggingface_hub import HfApi

    api = HfApi()
    with hub_errors(f"model {repository}: cannot be uploaded"):
        url = api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise BadInput(
                f"{repository}: exists and is public, but --private was given; make it private on the hub, or pass "
                "another name"
            )
        paths = [path for path in sorted(directory.iterdir()) if path.name not in NOT_UPLOADED]
        upload(api, repository, {path.name: path for path in paths}, "model", "A model trained by Lockstep")
    return str(url)


def save_network(network: GPT, directory: Path, dtype: str = "float32", **more: Any) -> None:
    """Write config.json and the weights in the form of the network's stock class.

    `more`: additional keys of config.json. If no stock class supports the network, BadInput is raised before anything
    is written.
    """
    config = stock_class(network.config).config | {"torch_dtype": dtype} | more
    plain = {key: unpadded(key, value.detach().cpu(), network.config) for key, value in network.named_parameters()}
    weights = {name: value.to(getattr(torch, dtype)) for name, value in to_stock(plain, network.config).items()}
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    replace_file(directory / CONFIG, json.dumps(config, indent=2) + "\n")


def generation_defaults(trained: Trained) -> dict[str, Any]:
    """Return the content of generation_config.json.

    It has the ids that end an answer, and the largest number of new tokens. For chat models, it also has the sampling
    options.
    """
    end, half = trained.tokenizer.end_of_text_id, max(1, trained.network.config.context_length // 2)
    values = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    values["max_new_tokens"] = min(LONGEST_GENERATION, half)
    if trained.template is None:
        return values
    options = SampleCommand("")
    sampling = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    return {**values, "eos_token_id": sorted(trained.stop_ids), "do_sample": True, **sampling}


def modelfile(trained: Trained) -> str | None:
    """Return the content of a Modelfile, with which ollama loads `model.gguf` from the same folder.

    Return None unless the model has one of our chat templates.
    """
    go_template = None if trained.template is None else GO_TEMPLATES.get(trained.template.text)
    if go_template is None:
        return None
    defaults, tokenizer = generation_defaults(trained), trained.tokenizer
    stops = [json.dumps(tokenizer.decode([token_id])) for token_id in defaults["eos_token_id"]]
    parameters: list[tuple[str, Any]] = [("stop", stop) for stop in stops]
    parameters += [(name, defaults[name]) for name in ("temperature", "top_k", "top_p")]
    parameters += [("num_predict", defaults["max_new_tokens"]), ("num_ctx", trained.network.config.context_length)]
    lines = ["FROM ./model.gguf", f'TEMPLATE """{go_template.replace(END_OF_TEXT, tokenizer.end_of_text)}"""']
    return "\n".join([*lines, *(f"PARAMETER {name} {value}" for name, value in parameters), ""])


def _write_model(trained: Trained, directory: Path, dtype: str = "float32") -> None:
    tokenizer = trained.tokenizer
    write_tokenizer_files(tokenizer, directory, trained.network.config.context_length, trained.template)
    end = {"bos_token_id": tokenizer.end_of_text_id, "eos_token_id": tokenizer.end_of_text_id}
    save_network(trained.network, directory, dtype, **end)
    replace_file(directory / GENERATION, json.dumps(generation_defaults(trained), indent=2) + "\n")
    if (ollama := modelfile(trained)) is not None:
        replace_file(directory / MODELFILE, ollama)
    # safetensors makes the weights readable only by their owner, so we copy the permissions of another file.
    (directory / WEIGHTS).chmod((directory / CONFIG).stat().st_mode)
