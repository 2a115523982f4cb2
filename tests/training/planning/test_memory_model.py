"""Predictions of memory count what the network really saves, and what fits is the most that fits."""

import attrs
import pytest
import torch

from common.errors import BadInput
from model.config import GPT2_SIZES, ModelConfig
from model.gpt import GPT
from tests.conftest import TINY_MODEL
from training.hardware.gpus import find_gpu, known_gpus
from training.planning.memory_model import GIB, MemoryModel, gpu_bytes
from training.planning.network_sizes import saved_bytes

TINY = ModelConfig(**TINY_MODEL | {"n_layers": 3})


@pytest.mark.parametrize("changes", [{}, {"tie_weights": False, "qkv_bias": False, "n_layers": 1}])
def test_predicted_activations_are_what_a_real_forward_pass_saves(changes: dict[str, object]) -> None:
    config = attrs.evolve(TINY, **changes)
    network = GPT(config)
    for microbatch_size in (1, 5):
        predicted = MemoryModel(model=config).predict(microbatch_size)
        attention_seeds = 24 * config.n_layers  # of flash attention's dropout, on a GPU only
        with torch.autocast("cpu", torch.bfloat16):
            assert predicted.activations + predicted.copies - attention_seeds == saved_bytes(network, microbatch_size)


def test_attention_saves_no_matrix_of_all_pairs_of_tokens() -> None:
    models = (MemoryModel(model=attrs.evolve(TINY, context_length=tokens)) for tokens in (256, 512))
    short, long = (memory.predict(1).activations for memory in models)
    assert long == 2 * short


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", GPT2_SIZES)
def test_what_fits_fits_and_one_more_does_not(size: str, kind: str) -> None:
    memory = MemoryModel(model=GPT2_SIZES[size], parallel=kind, world_size=8)
    for gpu in known_gpus().values():
        fits = memory.largest_microbatch(gpu_bytes(gpu))
        assert memory.predict((fits or 0) + 1).total > gpu_bytes(gpu)
        if fits is not None:
            assert memory.predict(fits).total <= gpu_bytes(gpu)


def test_shards_take_less_where_there_are_more_ranks() -> None:
    few, many = (MemoryModel(model=GPT2_SIZES["1.5B"], world_size=ranks) for ranks in (2, 8))
    assert many.predict(1) == few.predict(1)
    few, many = (attrs.evolve(memory, parallel="fsdp") for memory in (few, many))
    assert many.predict(1).allocated < few.predict(1).allocated


def test_an_unknown_gpu_is_told_the_nearest_name() -> None:
    for name, meant in (("a100-80bg", "'a100-80gb'"), ("a100", "'a100-40gb' or 'a100-80gb'"), ("h20", "'h200'")):
        with pytest.raises(BadInput, match=rf"unknown GPU '{name}'; did you mean {meant}\?"):
            find_gpu(name, known_gpus())


# Peaks that torch's own allocator, DDP and FSDP2 had on an emulated GPU, rank 0 of 8, two micro-batches a step.
PEAK_GIB = [("ddp", 8, 53.56), ("ddp", 16, 74.12), ("fsdp", 8, 32.68), ("fsdp", 16, 53.26)]


@pytest.mark.parametrize(("kind", "microbatch_size", "measured"), PEAK_GIB)
def test_the_peak_of_all_steps_is_predicted_ddps_first_ones_included(
    kind: str, microbatch_size: int, measured: float
) -> None:
    memory = MemoryModel(model=GPT2_SIZES["1.5B"], parallel=kind, world_size=8)
    predicted = memory.predict(microbatch_size).allocated / GIB
    assert measured <= predicted <= 1.053 * measured
