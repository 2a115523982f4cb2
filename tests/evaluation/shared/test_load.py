"""Models of runs and of other programs are loaded, or the reason why not is one line."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
import torch
from huggingface_hub import ModelCardData
from safetensors.torch import load_file, save_file

from common.errors import BadInput
from common.hub_client import OUR_TAG, note_local
from evaluation.shared.given_tokenizer import GivenTokenizer
from evaluation.shared.load import ModelLocation, Trained, given_tokenizer, home_of, load, locate
from tests.conftest import TINY_MODEL, only_line, seal_again
from tests.evaluation.comparison.stored import evaluate, said
from tests.model.test_gpt import SMALL
from tests.model.test_naming import gpjt, nanogpt, openai, plain_of
from tokens.tokenizer.loading import load_tokenizer, record_of
from tokens.tokenizer.template import TEMPLATES, Template
from training.checkpoints.saved_state import read_state


def test_a_run_is_asked_as_it_was_trained() -> None:
    good = "{# mine #}" + TEMPLATES["turns"].text
    for text, problem in (
        (good, None),
        (good.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|> ' }}"), "its prompt"),
    ):
        record = SimpleNamespace(template=text)
        place: Any = SimpleNamespace(tokenizer=record, run=Path("run"), path=Path("run"))
        trained = Trained(cast(Any, None), None, place)
        if problem is None:
            assert trained.template == Template(text)
            continue
        with pytest.raises(BadInput, match=r"^run/resolved\.json: .* its prompt: .*; train it on tokens"):
            _ = trained.template


@pytest.mark.parametrize("naming", [openai, nanogpt, gpjt])
def test_models_of_other_programs_are_asked_like_ours(
    copied: Path, tmp_path: Path, naming: Callable[..., dict[str, torch.Tensor]]
) -> None:
    ours = load(locate(str(copied), None), None, torch.device("cpu"))
    weights = naming(plain_of(ours.network), ours.network.config)
    if naming is gpjt:  # a run directory as that repository leaves it
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
    asked = said("smoke", tmp_path / "theirs", "--tokenizer", "bytes", "--prompt", "def")
    assert asked.split(":\n", 1)[1] == said("smoke", copied, "--prompt", "def").split(":\n", 1)[1]
    assert "pass it with --tokenizer" in evaluate("smoke", tmp_path / "theirs").stderr


def test_what_cannot_be_loaded_is_one_line(copied: Path, tmp_path: Path) -> None:
    typed = os.path.relpath(copied)
    assert str(locate(typed, "best").path) == f"{typed}/checkpoints/step-00000008"  # results name it as it was typed
    exported = tmp_path / "exported"
    said("export", copied, exported)
    (exported / "generation_config.json").write_text('{"eos_token_id": "x"}')
    damaged = load(locate(str(exported), None), None, torch.device("cpu"))  # most commands need no ends of an answer
    with pytest.raises(BadInput, match="eos_token_id: got 'x'"):
        _ = damaged.stop_ids
    config, weights = exported / "config.json", exported / "model.safetensors"
    good, tensors = config.read_text(), load_file(weights)

    def refused(*arguments: str | Path) -> str:
        return only_line(evaluate(*(arguments or ("smoke", exported))))

    assert f"{exported}: exists; pass another folder" in refused("export", copied, exported)
    assert "--checkpoint best applies to a run directory" in refused("smoke", exported, "--checkpoint", "best")
    (tmp_path / "empty").mkdir()
    assert "no model; wanted a run directory" in refused("smoke", tmp_path / "empty")
    assert "--license: got 'M I T'" in refused("export", copied, tmp_path / "new", "--license", "M I T")
    assert not (tmp_path / "new").exists()
    config.write_text(json.dumps(json.loads(good) | {"activation_function": "relu"}))
    assert "activation_function: got 'relu', wanted 'gelu_new'" in refused()
    config.write_text(json.dumps({key: value for key, value in json.loads(good).items() if key != "n_head"}))
    assert "got none of n_head" in refused()
    config.write_text("{")
    assert "not JSON" in refused()
    config.write_text(good)
    save_file({name: value for name, value in tensors.items() if "ln_f" not in name}, weights)
    assert "parameter final_norm.weight is missing" in refused()
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "damaged" in refused()
    weights.unlink()
    assert "missing; wanted weights as safetensors" in refused()
    (copied / "checkpoints/step-00000008/state.json").unlink()
    assert "state.json: missing; choose another checkpoint" in refused("smoke", copied)  # not taken for a foreign one


def test_a_best_checkpoint_that_is_not_here_is_said_not_replaced_by_the_newest(copied: Path) -> None:
    directory = copied / "checkpoints"
    state = json.loads((directory / "latest" / "state.json").read_text())
    assert state["best_step"] == state["step"] == 8
    (directory / "latest").unlink()
    (directory / "latest").symlink_to("step-00000004")  # as where a run has stopped then, and the best one is elsewhere
    shutil.rmtree(directory / "step-00000008")
    absent = f"{directory}/best: the best checkpoint, step-00000008, is not on this disk; .* another one: .*/latest"
    with pytest.raises(BadInput, match=absent):
        locate(str(copied), None)
    assert locate(str(directory / "latest"), None).path.name == "step-00000004"
    (directory / "best").unlink()  # where links were not copied, the newest state tells
    assert locate(str(copied), None).path.name == "step-00000004"
    shutil.copytree(directory / "step-00000004", directory / "kept")
    shutil.rmtree(directory / "step-00000004")
    (directory / "latest").unlink()
    (directory / "latest").symlink_to("kept")
    with pytest.raises(BadInput, match="the best checkpoint, step-00000004, is not on this disk"):
        locate(str(copied), None)


def test_a_checkpoint_behind_a_link_to_another_disk_belongs_to_its_run(copied: Path, tmp_path: Path) -> None:
    other = tmp_path / "disk" / "checkpoints"
    shutil.move(copied / "checkpoints", other)
    (copied / "checkpoints").symlink_to(other)
    place = locate(str(copied / "checkpoints" / "latest"), None)
    assert (place.run, place.home, place.path) == (copied, copied, copied / "checkpoints" / "step-00000008")
    assert home_of(str(copied / "checkpoints" / "latest")) == copied


@pytest.mark.parametrize("kind", ["folders", "files", "none"])
def test_a_copied_runs_links_are_understood(copied: Path, kind: str) -> None:
    directory = copied / "checkpoints"
    for link in ("latest", "best"):
        target = (directory / link).resolve()
        (directory / link).unlink()
        if kind == "folders":
            shutil.copytree(target, directory / link)
        elif kind == "files":
            (directory / link).write_text(f"{target.name}\n")
    if kind == "folders":
        for step in directory.glob("step-*"):
            shutil.rmtree(step)
    for name in (None, "latest", "best"):
        assert read_state(locate(str(copied), name).path).position.step == 8


def test_a_folder_that_hides_a_hub_model_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note_local.cache_clear()
    monkeypatch.chdir(tmp_path)
    for name in ("owner/model", "owner/run/checkpoints/step-1"):
        Path(name).mkdir(parents=True)
    assert home_of("owner/model") == Path("owner/model")
    assert "owner/model: reads the local path of this name; for a model of the hub write hf:owner/model" in (
        capsys.readouterr().err
    )
    assert home_of("hf:owner/model") == Path("runs/owner--model")
    home_of("owner/run")  # it can only be a run of ours
    note_local.cache_clear()
    data = ModelCardData(library_name="transformers", tags=["gpt2", OUR_TAG])
    Path("owner/model/README.md").write_text(f"---\n{data}\n---\n\n# model\n")
    home_of("owner/model")  # an export of ours
    assert capsys.readouterr().err == ""


def test_a_tokenizer_other_than_its_own_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def given(run: Path, name: str) -> GivenTokenizer | None:
        return given_tokenizer(ModelLocation(run / "checkpoints" / "a", run, run), load_tokenizer(name), SMALL)

    for name, record in (
        ("run", {"tokenizer": record_of(load_tokenizer("bytes"), ranks=False).as_json()}),
        ("old", {}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "resolved.json").write_text(json.dumps(record))
    assert given(tmp_path / "run", "bytes") is None  # the tokenizer of its tokens
    assert capsys.readouterr().err == ""
    other = given(tmp_path / "run", "chars:abc")
    assert other is not None and (other.name, other.is_other) == ("chars", True)
    assert "--tokenizer chars gives other ids than its own tokenizer, bytes" in capsys.readouterr().err
    unknown = given(tmp_path / "old", "bytes")
    assert unknown is not None and (unknown.name, unknown.is_other) == ("bytes", False)
    assert GivenTokenizer.of({"given_tokenizer": other.as_record()}) == other
    # A model of GPT-2's size that names no tokenizer is taken for one of GPT-2's tokens without --tokenizer as well.
    place = ModelLocation(tmp_path / "old" / "checkpoints" / "a", tmp_path / "old", tmp_path / "old")
    named = attrs.evolve(load_tokenizer("bytes"), name="gpt2")
    assert given_tokenizer(place, named, attrs.evolve(SMALL, vocab_size=50257)) is None
    assert given_tokenizer(place, named, SMALL) is not None
    for damaged in ({"name": 5, "identity": "x", "is_other": True}, "bytes", {"name": "bytes"}):
        with pytest.raises(ValueError, match="given_tokenizer: wanted an object"):
            GivenTokenizer.of({"given_tokenizer": damaged})


def test_a_checkpoint_of_another_version_is_loaded_unless_its_network_is_another(copied: Path) -> None:
    def change(section: str, **keys: Any) -> None:
        file = copied / "checkpoints" / "step-00000008" / "state.json"
        state = json.loads(file.read_text())
        state["config"][section] |= keys
        file.write_text(json.dumps(state))
        seal_again(file.parent)

    change("train", optimizer="lion", on_spike="skip")
    place = locate(str(copied), "latest")
    assert load(place, None, torch.device("cpu")).network.config.emb_dim == TINY_MODEL["emb_dim"]
    change("model", parallel_block=True)
    with pytest.raises(
        BadInput, match=r"step-00000008/state.json: model: unknown key 'parallel_block', so another version"
    ):
        load(place, None, torch.device("cpu"))
