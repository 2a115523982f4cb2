"""The held-out loss is the mean over unseen tokens, with a correct error, on any number of ranks."""

import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file

from common.errors import BadInput
from evaluation.loss.held_out_loss import _training_note, byte_lengths, summary
from evaluation.loss.loss_measures import LossSample, group_sums, loss_difference, read_results
from evaluation.loss.token_range import Range, check_unseen, is_certainly_unread, shared_documents
from evaluation.shared.load import load
from evaluation.shared.model_location import locate
from evaluation.shared.significance import mean_and_error
from tests.conftest import MakeRun, change_weights, complete, seal_again, shared
from tests.evaluation.comparison.stored import output_of, refused, results
from tests.tokens.format.token_directory import write_llm_c
from tests.tokens.preparing import PREPARE, run
from tokens.format.token_file import open_split
from tokens.tokenizer.loading import load_tokenizer
from training.checkpoints.run_record import StreamRecord
from training.checkpoints.saved_state import read_state

VALIDATED = 16 * 32  # number of tokens that the tiny run validates on


def loss(*arguments: str | Path, ranks: int = 1) -> str:
    return output_of("loss", *arguments, "--device", "cpu", ranks=ranks)


@pytest.fixture
def trained(make_run: MakeRun) -> Path:
    directory = make_run(validation_sequences=16)
    complete(directory, "--max-steps", "3")
    return directory


def test_loss_is_the_mean_on_any_number_of_ranks(trained: Path, token_files: Path) -> None:
    for ranks in (1, 2, 3):
        done = loss(trained, "--from", "1000", "--count", "4000", ranks=ranks)
        assert f"{token_files}: validation, tokens 1,000 to 5,000" in done
    first, *later = ({**result, "time": ""} for result in results(trained))
    assert [first] * 2 == later  # all bits are equal
    model = load(locate(str(trained), None), None, torch.device("cpu"))
    stream = open_split(token_files, "validation")
    nats, length = 0.0, 32
    with torch.no_grad():
        for start in range(1000, 5000, length):
            tokens = torch.from_numpy(stream.read(start, length + 1).astype(np.int64))[None]
            logits = model.network(tokens[:, :-1])[0].double()
            nats += float(F.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
    targets = stream.read(1001, 4000)
    assert first["nats_per_token"] == pytest.approx(nats / 4000, rel=1e-6)
    assert first["perplexity"] == pytest.approx(math.exp(nats / 4000), rel=1e-5)
    assert first["text_bytes"] == int((targets != 256).sum())  # every token is a byte, except the ends of documents
    assert first["bits_per_byte"] == pytest.approx(nats / math.log(2) / first["text_bytes"], rel=1e-6)


@pytest.mark.parametrize("correlation", [0.0, 0.7])
def test_error_matches_resampled_documents(correlation: float) -> None:
    draw = np.random.default_rng(0)
    tokenizer = load_tokenizer("bytes")
    results = []
    for _ in range(200):
        lengths = draw.integers(5, 200, 120)
        levels = draw.normal(0, 0.5, 120)
        for at in range(1, 120):
            levels[at] = correlation * levels[at - 1] + (1 - correlation**2) ** 0.5 * levels[at]
        levels += 3 + 40 / lengths  # short documents are harder, so a mean of ratios would differ
        losses = np.concatenate([draw.normal(level, 1, n) for level, n in zip(levels, lengths, strict=True)])
        targets = np.full(losses.shape, ord("a"))
        targets[np.cumsum(lengths) - 1] = tokenizer.end_of_text_id
        results.append(summary(losses.astype(np.float32), targets, tokenizer, np.ones(len(targets))))
    for value, error in (("nats_per_token", "nats_per_token_error"), ("bits_per_byte", "bits_per_byte_error")):
        spread = np.std([getattr(result, value) for result in results])
        errors = [getattr(result, error) for result in results]
        assert np.median(errors) == pytest.approx(spread, rel=0.1 if correlation == 0 else 0.35)
    assert f"± {results[-1].nats_per_token_error:.4f} nats per token" in str(results[-1])
    alike = ["equivalent to" in str(result) for result in results]
    assert np.mean(alike) < 0.1 if correlation == 0 else np.mean(alike) > 0.8


def alike_groups(seed: int) -> np.ndarray:
    """Return nats of 128 groups of 100 tokens. Each group is nearly as hard as the one before it."""
    drift = np.cumsum(np.random.default_rng(seed).normal(0, 0.05, 128))
    return (3.5 + drift - drift.mean()) * 100


def test_compare_cannot_tell_with_similar_documents() -> None:
    tokens = np.full(128, 100.0)
    a, b = (LossSample(nats=alike_groups(seed), tokens=tokens, is_gpjt_range=False) for seed in (0, 1))
    unclear = loss_difference([a], [b], 0.95)
    assert (unclear.low, unclear.high) == (None, None)
    independent = np.random.default_rng(2).normal(3.5, 0.1, 128) * 100
    clear = loss_difference([a], [LossSample(nats=a.nats - independent, tokens=tokens, is_gpjt_range=False)], 0.95)
    assert clear.excludes_zero


def test_old_results_account_for_similar_documents() -> None:
    nats = alike_groups(0)
    groups = {"nats": nats.tolist(), "tokens": [100] * 128, "text_bytes": [400] * 128}
    mean, error = mean_and_error(nats, np.full(128, 100.0))
    old = {
        "evaluation": "loss",
        "model": "m",
        "range": {"tokens": "t", "split": "validation", "start": 0, "count": 12_800, "sha256": "s"},
        "groups": groups,
        "nats_per_token": mean,
        "nats_per_token_error": error,
        "bits_per_byte": mean / math.log(2) / 4,
        "bits_per_byte_error": error / math.log(2) / 4,
    }
    [result], [later] = ([*read_results(measurement)] for measurement in (old, old | {"independent_documents": 9.0}))
    assert [measurement.error for measurement in later.measurements] == [error, old["bits_per_byte_error"]]
    assert all(
        measurement.error > 3 * before.error
        for measurement, before in zip(result.measurements, later.measurements, strict=True)
    )


def test_single_document_has_no_error() -> None:
    tokenizer = load_tokenizer("bytes")
    losses, text = np.ones(6, np.float32), np.full(6, ord("a"))
    alone = summary(losses, text, tokenizer, np.ones(6))
    assert str(alone).endswith(f"over {alone.tokens} tokens, documents: 1")
    assert (alone.documents, alone.nats_per_token_error, alone.nats_per_token) == (1, None, 1.0)
    text[[2, 5]] = 256
    assert summary(losses, text, tokenizer, np.ones(6)).documents == 2


def test_loss_in_nats_needs_no_tokenizer(trained: Path) -> None:
    loss(trained, "--count", "2000")
    record = json.loads((trained / "resolved.json").read_text())
    (trained / "resolved.json").write_text(json.dumps(record | {"tokenizer": None}))
    assert " nats per token, perplexity" in (shown := loss(trained, "--count", "2000")) and "bits" not in shown
    with_tokenizer, without_tokenizer = results(trained)
    assert without_tokenizer["nats_per_token"] == with_tokenizer["nats_per_token"]
    assert {without_tokenizer[key] for key in ("documents", "text_bytes", "bits_per_byte")} == {None}
    assert "held-out loss" in output_of("compare", trained)


def test_groups_of_documents_are_equal_for_all_models() -> None:
    draw = np.random.default_rng(0)
    tokenizer = load_tokenizer("bytes")
    targets = draw.integers(0, 256, 40_000)
    targets[draw.choice(40_000, 600, replace=False)] = tokenizer.end_of_text_id
    losses = draw.normal(3, 1, (2, 40_000)).astype(np.float32)
    first, second = (summary(model_losses, targets, tokenizer, np.ones(40_000)) for model_losses in losses)
    assert len(first.groups["nats"]) == 256
    assert first.groups["tokens"] == second.groups["tokens"]
    assert (sum(first.groups["tokens"]), sum(first.groups["text_bytes"])) == (40_000, first.text_bytes)
    assert sum(first.groups["nats"]) / 40_000 == pytest.approx(first.nats_per_token, abs=1e-8)
    ends = np.cumsum(first.groups["tokens"])[:-1] - 1
    assert (targets[ends] == tokenizer.end_of_text_id).all()
    _, error = mean_and_error(np.array(first.groups["nats"]), np.array(first.groups["tokens"]))
    # The result's errors are computed over documents. These documents are independent, so errors that are computed over
    # groups are similar.
    assert error == pytest.approx(first.nats_per_token_error, rel=0.2)
    _, error = mean_and_error(np.array(first.groups["nats"]) / math.log(2), np.array(first.groups["text_bytes"]))
    assert error == pytest.approx(first.bits_per_byte_error, rel=0.2)
    assert f"± {first.nats_per_token_error:.4f} nats per token" in str(first)


def test_byte_lengths_sum_to_the_text_size() -> None:
    tokenizer = load_tokenizer(str(shared("gpt2.tiktoken")))
    text = shared("wikitext2.txt").read_text()[:100_000] + "日本語 🙂"
    assert byte_lengths(tokenizer)[tokenizer.encode(text)].sum() == len(text.encode())
    assert byte_lengths(tokenizer)[tokenizer.end_of_text_id] == 0


def test_tokens_that_the_run_has_seen_are_refused(trained: Path, token_files: Path) -> None:
    loss(trained)
    length = open_split(token_files, "validation").length
    tokens = open_split(token_files, "validation").read(VALIDATED + 1, length - VALIDATED - 1)
    assert results(trained)[0]["range"] == {
        "tokens": str(token_files),
        "dataset": None,
        "split": "validation",
        "start": VALIDATED + 1,
        "count": length - VALIDATED - 2,
        "sha256": hashlib.sha256(tokens.astype(np.uint32).tobytes()).hexdigest(),
    }
    command = ("loss", trained, "--count", "100")
    validated = f"was validated on tokens 0 to {VALIDATED + 1:,} of this split; pass another --from"
    assert validated in refused(*command, "--from", "0")
    assert validated in refused(*command, "--from", str(VALIDATED))
    loss(trained, "--from", str(VALIDATED + 1), "--count", "100")
    assert "was trained on tokens 0 to" in refused(*command, "--split", "train", "--from", "0")
    assert len(results(trained)) == 2
    state = trained / "checkpoints" / "best" / "state.json"
    values = json.loads(state.read_text())
    for stream in ("train_stream", "validation_stream"):
        values["config"][stream]["sha256"] = []  # as if the tokens were still being written
    state.write_text(json.dumps(values))
    seal_again(state.parent)
    assert "was validated on tokens 0 to" in refused(*command, "--from", "0")
    assert "was trained on tokens 0 to" in refused(*command, "--split", "train", "--from", "0")


def test_foreign_models_are_measured_too(trained: Path, token_files: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    output_of("export", trained, exported)
    both = loss(trained, exported, "--count", "5000")
    _, ours, validated_elsewhere, document, theirs = both.splitlines()
    assert document == "  The tokens measured here begin inside the last document of that validation."
    assert validated_elsewhere.startswith("  The validation during training used other tokens, ")
    assert ours.split(": ", 1)[1] + "; its training data are unknown" == theirs.split(": ", 1)[1]
    assert " nats per token, perplexity " in ours
    assert results(exported)[0]["nats_per_token"] == results(trained)[0]["nats_per_token"]


def test_foreign_token_files_are_measured(trained: Path, token_files: Path, tmp_path: Path) -> None:
    stream = open_split(token_files, "validation")
    write_llm_c(tmp_path / "tiny_val_000000.bin", stream.read(0, stream.length))
    for tokens in (token_files, tmp_path):
        loss(trained, "--tokens", tokens, "--from", "1000", "--count", "3000")
    ours, theirs = results(trained)
    assert ours["range"] | {"tokens": str(tmp_path)} == theirs["range"]
    assert ours["nats_per_token"] == theirs["nats_per_token"]


def test_seen_tokens_are_recognized_after_new_shards(make_run: MakeRun, token_files: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    stream = open_split(token_files, "train")
    for number in (1, 2):
        write_llm_c(shards / f"tiny_train_{number}.bin", stream.read(number * 2000, 2000))
    run = make_run(dataset=str(shards), min_train_tokens=256, validation_interval=None)
    complete(run)
    write_llm_c(shards / "tiny_train_3.bin", stream.read(0, 2000))
    measured = ("--tokens", shards, "--split", "train", "--count", "100", "--tokenizer", "bytes")
    assert "was trained on tokens 0 to 257 of this split" in refused("loss", run, *measured, "--from", "200")
    loss(run, *measured, "--from", "257")


def test_unmeasurable_ranges_are_refused(trained: Path, token_files: Path, tmp_path: Path) -> None:
    too_many = ("--from", "0", "--count", "99999999")
    assert "wanted 99,999,999 tokens to predict after --from 0" in refused("loss", trained, *too_many)
    assert "no test tokens" in refused("loss", trained, "--split", "test")
    assert "no such directory" in refused("loss", trained, tmp_path / "absent", ranks=2)
    (tmp_path / "a.txt").write_text("text of another tokenizer " * 100)
    options = (tmp_path / "a.txt", "--output", tmp_path / "gpt2", "--tokenizer", shared("gpt2.tiktoken"))
    assert run(PREPARE, *options).returncode == 0
    message = refused("loss", trained, "--tokens", tmp_path / "gpt2", "--split", "train")
    assert "its tokens are from tokenizer gpt2.tiktoken, but" in message
    change_weights(trained / "checkpoints" / "latest", lambda weights: weights["final_norm.bias"].fill_(torch.nan))
    assert "its loss is not finite" in refused("loss", trained, "--checkpoint", "latest", "--count", "100", ranks=2)


def test_equal_models_differ_once_in_twenty() -> None:
    draw = np.random.default_rng(0)
    significant = 0
    for _ in range(200):
        tokens = draw.integers(50, 2000, 300).astype(float)
        hardness = draw.normal(3.5, 0.6, 300)
        samples = []
        for _ in range(2):
            groups = group_sums((hardness + draw.normal(0, 0.1, 300)) * tokens, tokens, tokens)
            sample = LossSample(
                nats=np.array(groups["nats"]), tokens=np.array(groups["tokens"], float), is_gpjt_range=False
            )
            samples.append(sample)
        significant += loss_difference(samples[:1], samples[1:], 0.95).excludes_zero
    assert 3 <= significant <= 18  # 10 of 200 are expected
    a, b = (LossSample(nats=np.array([nats]), tokens=np.array([10.0]), is_gpjt_range=False) for nats in (34.0, 30.0))
    difference = loss_difference([a], [b], 0.95)  # from a single group
    assert (round(difference.value, 9), difference.low, difference.high) == (0.4, None, None)


def test_loss_notes_other_validation_tokens(finished: Path) -> None:
    location = locate(str(finished), None)
    span = Range(directory=location.job.token_directories[0], split="validation", start=1000, count=1)
    trained: Any = SimpleNamespace(location=location, known_tokenizer=None)
    loss = read_state(location.path).position.validation_loss
    words = "The validation during training used other tokens, 0 to 320, with a loss of"
    assert _training_note(trained, span) == f"\n  {words} {loss:.4f}."


def test_document_cut_by_validation_is_noted(tmp_path: Path) -> None:
    end = 9
    documents = np.array([1, 2, end, 3, 4, 5, end, 6, end, 7, 7, 7, 7, end], np.uint16)
    save_file({"tokens": documents}, tmp_path / "validation.safetensors")
    digest = hashlib.sha256((tmp_path / "validation.safetensors").read_bytes()).hexdigest()
    streams = [StreamRecord(tokens=14, sha256=[digest])]

    def lines(validated: tuple[int, int], start: int, count: int, end_of_text_id: int | None = end) -> list[str]:
        span = Range(directory=tmp_path, split="validation", start=start, count=count)
        return shared_documents(streams, validated, span, end_of_text_id)

    begins, ends = (
        f"The tokens measured here {words} document of that validation."
        for words in ("begin inside the last", "end inside the first")
    )
    assert lines((0, 4), 4, 8) == lines((0, 4), 5, 8) == [begins]  # 3, 4 | 5
    assert lines((0, 4), 6, 7) == []  # the next token, 6, is from another document
    assert lines((0, 6), 6, 7) == lines((0, 6), 7, 6) == []  # the end of text was part of the validation
    assert lines((0, 9), 11, 2) == [begins]
    assert lines((4, 8), 0, 3) == [ends] and lines((4, 8), 0, 2) == []
    assert lines((0, 4), 4, 8, None) == []
    streams = [StreamRecord(tokens=14, sha256=["0" * 64])]  # the hash of other tokens
    assert lines((0, 4), 4, 8) == []


def test_tokens_in_other_files_are_recognized_or_unknown(finished: Path, token_files: Path, tmp_path: Path) -> None:
    location, stream = locate(str(finished), None), open_split(token_files, "train")
    for number in (1, 2):  # the same tokens, in shards of another format
        write_llm_c(tmp_path / f"tiny_train_{number}.bin", stream.read((number - 1) * 2000, 2000))
    span = Range(directory=tmp_path, split="train", start=0, count=100)
    with pytest.raises(BadInput, match="was trained on tokens 0 to"):
        check_unseen(location, span)
    assert is_certainly_unread(location, Range(directory=token_files, split="validation", start=1000, count=100))

    folder = tmp_path / "other"
    folder.mkdir()
    write_llm_c(folder / "tiny_train_1.bin", stream.read(2000, 2000))
    unknown = attrs.evolve(span, directory=folder)
    check_unseen(location, unknown)
    trained: Any = SimpleNamespace(location=location)
    assert "It is unknown whether the run has read this text" in _training_note(trained, unknown)
