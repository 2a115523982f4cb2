"""Models of runs and of other programs are loaded, or a one-line error says why not."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import BadInput
from evaluation.shared.load import Trained, load
from evaluation.shared.model_location import locate
from tests.conftest import TINY_MODEL, only_line, seal_again
from tests.evaluation.comparison.stored import evaluate, output_of
from tests.model.test_naming import gpjt, nanogpt, openai, plain_of
from tokens.tokenizer.template import TEMPLATES, Template


def test_template_that_changes_the_trained_prompt_is_refused() -> None:
    good = "{# mine #}" + TEMPLATES["turns"].text
    for text, problem in (
        (good, None),
        (good.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|> ' }}"), "the prompt"),
    ):
        record = SimpleNamespace(template=text)
        location: Any = SimpleNamespace(tokenizer=record, run=Path("run"), path=Path("run"))
        trained = Trained(cast(Any, None), None, location)
        if problem is None:
            assert trained.template == Template(text)
            continue
        with pytest.raises(BadInput, match=r"^run/resolved\.json: .* prompt that asks for it: .*; prepare the tokens"):
            _ = trained.template


@pytest.mark.parametrize("naming", [openai, nanogpt, gpjt])
def test_foreign_models_generate_like_ours(
    copied: Path, tmp_path: Path, naming: Callable[..., dict[str, torch.Tensor]]
) -> None:
    ours = load(locate(str(copied), None), None, torch.device("cpu"))
    weights = naming(plain_of(ours.network), ours.network.config)
    if naming is gpjt:  # a run directory like those in gpjt's repository
        folder = tmp_path / "theirs" / "checkpoints" / "20251201Z120000-iteration-2"
        folder.mkdir(parents=True)
        (tmp_path / "theirs" / "model.json").write_text((copied / "model.json").read_text())
        (folder.parent / "best").symlink_to(folder.name)
    else:
        folder = tmp_path / "theirs"
        folder.mkdir()
        config = {"n_head": TINY_MODEL["n_heads"], "activation_function": "gelu_new"}
        (folder / ("hparams.json" if naming is openai else "config.json")).write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    output = output_of("smoke", tmp_path / "theirs", "--tokenizer", "bytes", "--prompt", "def")
    assert output.split(":\n", 1)[1] == output_of("smoke", copied, "--prompt", "def").split(":\n", 1)[1]
    assert "pass --tokenizer" in evaluate("smoke", tmp_path / "theirs").stderr


def test_unloadable_models_give_one_line_errors(copied: Path, tmp_path: Path) -> None:
    typed = os.path.relpath(copied)
    # Results contain the path exactly as the user typed it.
    assert str(locate(typed, "best").path) == f"{typed}/checkpoints/step-00000008"
    exported = tmp_path / "exported"
    output_of("export", copied, exported)
    (exported / "generation_config.json").write_text('{"eos_token_id": "x"}')
    # A damaged generation_config.json is accepted here, because most commands do not need the ids that end an answer.
    damaged = load(locate(str(exported), None), None, torch.device("cpu"))
    with pytest.raises(BadInput, match="eos_token_id: got 'x'"):
        _ = damaged.stop_ids
    config, weights = exported / "config.json", exported / "model.safetensors"
    good, tensors = config.read_text(), load_file(weights)

    def refused(*arguments: str | Path) -> str:
        return only_line(evaluate(*(arguments or ("smoke", exported))))

    assert f"{exported}: exists; pass another folder" in refused("export", copied, exported)
    assert "not a run directory, so --checkpoint best does not apply" in refused(
        "smoke", exported, "--checkpoint", "best"
    )
    (tmp_path / "empty").mkdir()
    assert "not a model; wanted a run directory" in refused("smoke", tmp_path / "empty")
    assert "--license: got 'M I T'" in refused("export", copied, tmp_path / "new", "--license", "M I T")
    assert not (tmp_path / "new").exists()
    config.write_text(json.dumps(json.loads(good) | {"activation_function": "relu"}))
    assert "activation_function: got 'relu', wanted 'gelu_new'" in refused()
    config.write_text(json.dumps({key: value for key, value in json.loads(good).items() if key != "n_head"}))
    assert "got none of the keys n_head" in refused()
    config.write_text("{")
    assert "not JSON" in refused()
    config.write_text(good)
    save_file({name: value for name, value in tensors.items() if "ln_f" not in name}, weights)
    assert "parameter final_norm.weight is missing" in refused()
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "damaged" in refused()
    weights.unlink()
    assert "missing; wanted weights in safetensors files" in refused()
    (copied / "checkpoints/step-00000008/state.json").unlink()
    # The checkpoint is not treated as another program's model.
    assert "state.json: missing; choose another checkpoint" in refused("smoke", copied)


def test_checkpoint_with_unknown_train_keys_loads(copied: Path) -> None:
    def change(section: str, **keys: Any) -> None:
        file = copied / "checkpoints" / "step-00000008" / "state.json"
        state = json.loads(file.read_text())
        state["config"][section] |= keys
        file.write_text(json.dumps(state))
        seal_again(file.parent)

    change("train", optimizer="lion", on_spike="skip")
    location = locate(str(copied), "latest")
    assert load(location, None, torch.device("cpu")).network.config.emb_dim == TINY_MODEL["emb_dim"]
    change("model", parallel_block=True)
    with pytest.raises(
        BadInput, match=r"step-00000008/state.json: model: unknown key 'parallel_block', so another version"
    ):
        load(location, None, torch.device("cpu"))
