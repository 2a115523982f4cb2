"""Exports load in Hugging Face's own classes and give the same output as in Lockstep; published models load here."""

import json
import math
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.errors import BadInput
from common.hub_client import is_own_export
from evaluation.core.core import Choice, choice_losses
from evaluation.export import export as export_module
from evaluation.export.export import export
from evaluation.shared.load import Trained, load
from evaluation.shared.model_location import ModelLocation, locate
from model.generate import Sampling
from tests import launch
from tests.conftest import KILLED, ROOT, TINY_MODEL, MakeRun, complete, one_line, only_line, shared, slow
from tests.evaluation.comparison.stored import evaluate, output_of
from tests.hub_server import Hub, serve
from tests.hub_server import environment as at_hub
from tests.model.architectures import ARCEE, NANOCHAT, QWEN3, SWIGLU
from tests.model.test_generate import generate
from tests.model.test_gpt import SMALL
from tests.model.test_naming import network
from tests.tokens.gpt2 import strange_texts
from tokens.tokenizer.hugging_face_files import read_tokenizer_files
from tokens.tokenizer.loading import load_tokenizer
from tokens.tokenizer.template import ASSISTANT, SYSTEM, TEMPLATES, USER, Message, Template
from training.config.train_config import load_run
from training.telemetry.metrics_log import METRICS

TEXTS = [
    "Hi!",
    "  both ends \n",
    "\n\n\nx\r\n\ty",
    "日本語 🚀 naïve",
    "if x:\n    '''{{ y }}''' # {% %}",
    "<|end|>",
    "",
]
CONVERSATIONS = [
    *([Message(USER, text)] for text in TEXTS),
    *([Message(SYSTEM, text), Message(USER, text), Message(ASSISTANT, text), Message(USER, "more")] for text in TEXTS),
]


def trained(reference: str) -> Trained:
    return load(locate(reference, None), None, torch.device("cpu"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with serve({}) as server:
        server.new = tmp_path_factory.mktemp("hub")
        yield server


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tie_weights": False, "qkv_bias": False}, "GPT2LMHeadModel"),
        (NANOCHAT | {"logit_softcap": 15.0}, "NanoChatForCausalLM"),
        *slow(({"tie_weights": True, "qkv_bias": True}, "GPT2LMHeadModel"), (QWEN3, "Qwen3ForCausalLM")),
        *slow((SWIGLU | {"n_kv_heads": 1}, "LlamaForCausalLM"), (ARCEE, "ArceeForCausalLM")),
    ],
)
def test_transformers_loads_exports_in_either_precision(
    make_run: MakeRun, tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    run = make_run(model=options)
    complete(run, "--max-steps", "3")
    ours = trained(str(run))
    prompt = ours.tokenizer.encode("def ").tolist()
    tokens = torch.randint(TINY_MODEL["vocab_size"], (3, TINY_MODEL["context_length"]))
    stored = {}
    for dtype in ("float32", "bfloat16"):
        output_of("export", run, tmp_path / dtype, "--dtype", dtype)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / dtype, trust_remote_code=False).eval()
        assert (type(theirs).__name__, theirs.dtype) == (name, getattr(torch, dtype))
        card = (tmp_path / dtype / "README.md").read_text()
        assert f"Face's own `{name}`" in card
        assert ("gpt2" in card.partition("# ")[0].lower()) == (name == "GPT2LMHeadModel")
        stored[dtype] = load_file(tmp_path / dtype / "model.safetensors")
        assert {value.dtype for value in stored[dtype].values()} == {getattr(torch, dtype)}
        # No length limit is passed, because generation_config.json has one that suits the short context.
        piped = pipeline("text-generation", str(tmp_path / dtype))("def ")
        assert piped[0]["generated_text"].startswith("def ")
        if dtype == "float32":
            with torch.no_grad():
                assert (ours.network(tokens) - theirs(tokens).logits).abs().max() < 1e-5
            spoken = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
            our_ids = generate(ours.network, prompt, 12, Sampling(temperature=0))
            assert spoken[0, len(prompt) :].tolist() == our_ids
    assert all(torch.equal(value, stored["float32"][key].bfloat16()) for key, value in stored["bfloat16"].items())
    assert AutoTokenizer.from_pretrained(tmp_path / "float32")("def ")["input_ids"] == prompt
    back = trained(str(tmp_path / "float32"))  # import the export
    assert back.network.config.tie_weights == ours.network.config.tie_weights
    with torch.no_grad():
        assert (back.network(tokens) - ours.network(tokens)).abs().max() < 1e-6


@pytest.mark.slow
def test_exported_tokenizer_equals_gpt2s(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from tokens.tokenizer.hugging_face_files import write_tokenizer_files

    ours = load_tokenizer(str(shared("gpt2.tiktoken")))
    write_tokenizer_files(ours, tmp_path, 1024)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    back = read_tokenizer_files(tmp_path)
    assert back is not None
    (tmp_path / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    older = read_tokenizer_files(tmp_path)  # vocab.json is read instead
    assert older is not None
    assert theirs.eos_token_id == back.end_of_text_id == ours.end_of_text_id == 50256
    for text in [*strange_texts(200), shared("tinyshakespeare.txt").read_text()[:20_000]]:
        ids = ours.encode(text.replace("<|endoftext|>", "")).tolist()
        assert theirs(text.replace("<|endoftext|>", ""))["input_ids"] == ids
        assert back.encode(text).tolist() == older.encode(text).tolist() == ours.encode(text).tolist()
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


@pytest.mark.slow
def test_pushed_model_equals_the_export(copied: Path, hub: Hub, tmp_path: Path) -> None:
    push = ("export", copied, tmp_path / "out", "--push", "owner/model")
    without_token = evaluate(*push, environment=at_hub(hub, None))
    assert (without_token.returncode, "no access token for the Hugging Face hub" in without_token.stderr) == (1, True)
    assert not (tmp_path / "out").exists()
    assert f"{hub.url}/owner/model" in output_of(*push, environment=at_hub(hub))
    uploaded = {path.name: path.read_bytes() for path in hub.datasets["owner/model"].iterdir()}
    assert uploaded == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    where = at_hub(hub)
    here, there = (output_of("smoke", model, "--prompt", "def", environment=where) for model in (copied, "owner/model"))
    assert there.split(":\n", 1)[1] == here.split(":\n", 1)[1]
    run, tokens = tmp_path / "new", load_run(copied, []).train.data.dataset
    options = ("--like", "hf:owner/model", "--init-from", "owner/model", "--set", f"dataset={tokens}")
    complete(run, *options, "--max-steps", "1", environment=where)
    assert load_run(run, []).model == load_run(copied, []).model
    output_of(*push, environment=at_hub(hub))  # push again, as if the first push had failed
    refused = evaluate("export", copied, tmp_path / "more", "--push", "somebody/model", environment=at_hub(hub))
    assert "You don't have the rights" in one_line(refused)


def test_export_to_a_mount_point_is_refused(finished: Path, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    if subprocess.run(["mount", "--bind", mount, mount], stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        with pytest.raises(BadInput, match="it is a mount point: choose a folder inside it"):
            export(trained(str(finished)), mount, None, None)
        assert [path.name for path in tmp_path.iterdir()] == ["mount"]
        export(trained(str(finished)), mount / "model", None, None)
        assert (mount / "model" / "config.json").is_file()
    finally:
        subprocess.run(["umount", mount], check=True)


def test_second_simultaneous_export_is_refused(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out, write = trained(str(finished)), tmp_path / "out", export_module._write_model

    def overtaken(model: Trained, partial: Path, dtype: str) -> None:
        with pytest.raises(
            BadInput, match=r"out: another export is writing to this folder; wait for it, or pass another folder"
        ):
            export(model, out, None, None)  # as another process might do
        write(model, partial, dtype)

    monkeypatch.setattr(export_module, "_write_model", overtaken)
    export(model, out, None, None)
    assert "config.json" in {path.name for path in out.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failed_export_leaves_no_model(finished: Path, tmp_path: Path) -> None:
    export_it = (str(ROOT / "evaluate.py"), "export", str(finished), str(out := tmp_path / "out"))
    killed = launch.run(KILLED, *export_it, environment={"KILL_AT": str(out)})
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists() and (tmp_path / ".partial-out" / "model.safetensors").is_file()
    full = launch.run(Path(export_it[0]), *export_it[1:], file_bytes=5_000)
    assert f"evaluate.py: {out}: cannot be written" in only_line(full)
    assert [*tmp_path.iterdir()] == []
    launch.run(Path(export_it[0]), *export_it[1:]).check_returncode()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_leftovers_of_a_killed_export_are_handled(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for leftover in (
        ".partial-out/more/weights",
        ".partial-other/model.safetensors",
        ".partial-old-x1y2/model/config.json",
    ):
        (tmp_path / leftover).parent.mkdir(parents=True)
        (tmp_path / leftover).touch()
    (tmp_path / ".partial-step-00000001").mkdir()
    export(trained(str(finished)), tmp_path / "out", None, None)
    assert not (tmp_path / ".partial-out").exists() and (tmp_path / "out" / "config.json").is_file()
    errors = capsys.readouterr().err
    for name in (".partial-other", ".partial-old-x1y2"):
        assert f"NOTE: {tmp_path / name}: an unfinished export; if no program is still writing it" in errors
    assert "step-00000001" not in errors


def test_model_card_describes_the_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    complete(run, "--price-per-hour", "3.29", "--max-steps", "4")
    lines = (run / METRICS).read_text().splitlines()
    first_line = json.loads(lines[0]) | {"devices": {"NVIDIA A100": 8}, "software": "torch 2.12.0, Python 3.10.1"}
    # Pretend that the first job ran on another machine.
    (run / METRICS).write_text("\n".join([json.dumps(first_line), *lines[1:]]) + "\n")
    complete(run, "--price-per-hour", "3.29")
    output_of("export", run, tmp_path / "named", "--license", "mit")
    card = (tmp_path / "named" / "README.md").read_text()
    state = json.loads((run / "checkpoints" / "best" / "state.json").read_text())
    batch, length = state["config"]["global_batch_size"], TINY_MODEL["context_length"]
    loss = state["validation_loss"]
    for line in (
        "license: mit",
        "# named",
        f"| tokens | {state['tokens']:,} |",
        f"| global batch | {batch} sequences of {length} tokens, {batch * length:,} tokens |",
        f"| validation loss | {loss:.4f} nats per token (perplexity {math.exp(loss):,.2f}) |",
        f"| seed | {state['config']['train']['random_seed']} |",
        "at $3.29 an hour |",
        "| machine | 8 x NVIDIA A100, from step 4 on 1 x ",
        f"| software | torch 2.12.0, Python 3.10.1, from step 4 on torch {torch.__version__}, Python ",
    ):
        assert line in card
    assert str(tmp_path) not in card
    assert "| dataset | `bytes` |" in card
    assert "| learning rate | 2 steps of warm-up to 0.01, cosine decay to 0.001 at step 8 |" in card
    assert "None" not in card
    assert is_own_export(tmp_path / "named") and not is_own_export(tmp_path)


def chat_model(folder: Path, template: Template, **options: Any) -> Trained:
    tokenizer = load_tokenizer("bytes").with_special_tokens(template.turn_tokens)
    config = attrs.evolve(SMALL, **options, vocab_size=tokenizer.vocabulary_size, context_length=400)
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").write_text(template.text)
    return Trained(network(config), tokenizer, ModelLocation(folder, None, folder))


@pytest.mark.parametrize("options", [QWEN3, *slow({}, {"tie_weights": False}, SWIGLU, SWIGLU | {"tie_weights": True})])
def test_transformers_chats_with_the_same_tokens(tmp_path: Path, options: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    template = TEMPLATES["turns"]
    ours, out = chat_model(tmp_path, template, **options), tmp_path / "out"
    export(ours, out, None, None)
    back = trained(str(out))
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    assert (out / "chat_template.jinja").read_bytes().decode() == tokenizer.chat_template == template.text
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == template.text
    assert theirs.generation_config.eos_token_id == sorted(ours.stop_ids) == sorted(back.stop_ids)
    for number, messages in enumerate(CONVERSATIONS):
        prompt = template.prompt(ours.tokenizer, messages)
        conversation = [message._asdict() for message in messages]
        their_prompt = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
        )
        assert back.template is not None
        assert their_prompt == back.template.prompt(back.tokenizer, messages) == prompt
        if number % 4:
            continue
        answer = generate(ours.network, prompt, 16, Sampling(temperature=0), ours.stop_ids)
        assert answer == generate(back.network, prompt, 16, Sampling(temperature=0), back.stop_ids)
        their_answer = theirs.generate(torch.tensor([their_prompt]), do_sample=False, max_new_tokens=16)[
            0, len(prompt) :
        ].tolist()
        assert their_answer[: len(answer)] == answer
        assert set(their_answer[len(answer) :]) <= ours.stop_ids


def test_modelfile_is_written_only_for_our_templates(tmp_path: Path) -> None:
    for name in TEMPLATES:
        export(chat_model(tmp_path, TEMPLATES[name]), tmp_path / name, None, None)
    modelfile = (tmp_path / "turns" / "Modelfile").read_text()
    turns = "{{ range .Messages }}<|{{ .Role }}|>{{ .Content }}<|end|>"
    assert modelfile.startswith(f'FROM ./model.gguf\nTEMPLATE """{turns}')
    assert 'PARAMETER stop "<|end|>"\n' in modelfile and 'PARAMETER stop "<|endoftext|>"\n' in modelfile
    assert "PARAMETER num_ctx 400\n" in modelfile
    assert "### Response:\n{{ .Content }}<|endoftext|>" in (tmp_path / "alpaca" / "Modelfile").read_text()
    custom = Template("{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}")
    export(chat_model(tmp_path, custom), tmp_path / "own", None, None)
    assert (tmp_path / "own" / "chat_template.jinja").is_file() and not (tmp_path / "own" / "Modelfile").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)  # importing the harness takes ten seconds
def test_lm_evaluation_harness_agrees_with_our_scores(make_run: MakeRun, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    complete(run := make_run(), "--max-steps", "2")
    output_of("export", run, tmp_path / "exported")
    model = trained(str(run))
    pairs = [("def main(", "): pass"), ("The", " same"), ("日本語", "🚀"), ("a b c", " d e f g h")]
    requests = [Instance("loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs]
    harness = HFLM(pretrained=str(tmp_path / "exported"), batch_size=2, device="cpu")  # runs without Lockstep's code
    rows = [[model.tokenizer.encode(text) for text in pair] for pair in pairs]
    choices = [[Choice(np.concatenate(parts), len(parts[1]))] for parts in rows]
    ours = [(-float(nats.sum()), bool(likeliest.all())) for ((nats, likeliest),) in choice_losses(model, choices)]
    assert harness.loglikelihood(requests, disable_tqdm=True) == [(pytest.approx(a, abs=1e-4), b) for a, b in ours]
