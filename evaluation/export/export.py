"""Export to a model directory that Hugging Face's libraries load without remote code; upload to the hub."""

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

OURS = (EVALUATIONS, ANSWERS)  # results about the model, stored beside it: not uploaded
MODELFILE = "Modelfile"
LONGEST_GENERATION = 256  # tokens, the default of pipelines; a short context gets less
# Our templates in the language of Go, in which ollama renders them.
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
    show(f"{command.directory}: AutoModelForCausalLM.from_pretrained loads it")
    if repository is not None:
        show(push(command.directory, repository, private=command.private))


def export(
    trained: Trained, directory: Path, repository: str | None, license_name: str | None, dtype: str = "float32"
) -> None:
    """Write the directory atomically. Raises BadInput where it holds something else, or no stock class has the network.

    A directory with the same weights that is to be pushed to a repository is kept: an earlier push may have failed.
    """
    stock_class(trained.network.config, str(trained.place.path))
    directory = directory.resolve()
    for left in _other_partials(directory):
        show(note(f"{left}: left by an export that was killed, unless one still writes it; delete it to free the disk"))
    contention = f"{directory}: another export writes it; wait for it, or pass another folder"
    with (
        refusing(f"{directory}: cannot be written", kinds=(SafetensorError,)),
        writing(directory),
        partial_directory(directory, contention) as partial,
    ):
        empty = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
        if not empty and (repository is None or not (directory / WEIGHTS).is_file()):
            raise BadInput(f"{directory}: exists; pass another folder, or delete it")
        if empty and directory.exists():
            directory.rmdir()  # a mount is refused: nothing can be renamed to it
        _write_model(trained, partial, dtype)
        replace_file(partial / CARD, model_card(trained, repository or directory.name, license_name, dtype))
        if empty:
            publish_folder(partial, directory)
        elif not filecmp.cmp(directory / WEIGHTS, partial / WEIGHTS, shallow=False):
            raise BadInput(f"{directory}: holds other weights; pass another folder, or delete it")


def _other_partials(directory: Path) -> list[Path]:
    """Return folders next to a directory in which exports to other names have begun, also by earlier versions."""
    others = directory.parent.glob(f"{PARTIAL}*")
    signs = ("model", CONFIG, WEIGHTS, "tokenizer.json")  # an earlier version wrote into a folder "model"
    begun = [path for path in others if path != partial_of(directory) and any((path / sign).exists() for sign in signs)]
    return sorted(path for path in begun if not is_own_partial(path))


def push(directory: Path, repository: str, *, private: bool) -> str:
    """Upload an exported directory; return its URL. Raises BadInput when the hub cannot be reached or refuses."""
    from huggingface_hub import HfApi

    api = HfApi()
    with hub_errors(f"model {repository}: cannot be uploaded"):
        url = api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise BadInput(f"{repository}: exists and is public; make it private on the hub, or pass another name")
        paths = [path for path in sorted(directory.iterdir()) if path.name not in OURS]
        upload(api, repository, {path.name: path for path in paths}, "model", "A model trained by Lockstep")
    return str(url)


def save_network(network: GPT, directory: Path, dtype: str = "float32", **more: Any) -> None:
    """Write config.json, with `more`, and weights as the stock class has them. Raises BadInput, before, without one."""
    config = stock_class(network.config).config | {"torch_dtype": dtype} | more
    plain = {key: unpadded(key, value.detach().cpu(), network.config) for key, value in network.named_parameters()}
    weights = {name: value.to(getattr(torch, dtype)) for name, value in to_stock(plain, network.config).items()}
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    replace_file(directory / CONFIG, json.dumps(config, indent=2) + "\n")


def generation_defaults(trained: Trained) -> dict[str, Any]:
    """Return the content of generation_config.json: ids that end an answer, its length; of a chat model, sampling."""
    end, half = trained.tokenizer.end_of_text_id, max(1, trained.network.config.context_length // 2)
    values = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    values["max_new_tokens"] = min(LONGEST_GENERATION, half)
    if trained.template is None:
        return values
    options = SampleCommand("")
    sampling = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    return {**values, "eos_token_id": sorted(trained.stop_ids), "do_sample": True, **sampling}


def modelfile(trained: Trained) -> str | None:
    """Return ollama's description of a model, `model.gguf` beside it; None for a template that is not ours, or none."""
    go = None if trained.template is None else GO_TEMPLATES.get(trained.template.text)
    if go is None:
        return None
    defaults, tokenizer = generation_defaults(trained), trained.tokenizer
    stops = [json.dumps(tokenizer.decode([each])) for each in defaults["eos_token_id"]]
    parameters: list[tuple[str, Any]] = [("stop", each) for each in stops]
    parameters += [(name, defaults[name]) for name in ("temperature", "top_k", "top_p")]
    parameters += [("num_predict", defaults["max_new_tokens"]), ("num_ctx", trained.network.config.context_length)]
    lines = ["FROM ./model.gguf", f'TEMPLATE """{go.replace(END_OF_TEXT, tokenizer.end_of_text)}"""']
    return "\n".join([*lines, *(f"PARAMETER {name} {value}" for name, value in parameters), ""])


def _write_model(trained: Trained, directory: Path, dtype: str = "float32") -> None:
    tokenizer = trained.tokenizer
    write_tokenizer_files(tokenizer, directory, trained.network.config.context_length, trained.template)
    end = {"bos_token_id": tokenizer.end_of_text_id, "eos_token_id": tokenizer.end_of_text_id}
    save_network(trained.network, directory, dtype, **end)
    replace_file(directory / GENERATION, json.dumps(generation_defaults(trained), indent=2) + "\n")
    if (ollama := modelfile(trained)) is not None:
        replace_file(directory / MODELFILE, ollama)
    (directory / WEIGHTS).chmod((directory / CONFIG).stat().st_mode)  # safetensors lets nobody else read it
