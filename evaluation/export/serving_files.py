"""Files for servers of other projects: defaults of generation, and ollama's Modelfile."""

import json
from typing import Any

from evaluation.command_line import SampleCommand
from evaluation.shared.load import Trained
from tokens.tokenizer.template import TEMPLATES
from tokens.tokenizer.tokenizer import END_OF_TEXT

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
