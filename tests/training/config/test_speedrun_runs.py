"""Run directories of the speedrun: all have the same recipe, take as many steps as the record, and can be exported."""

import attrs
import pytest

from model.stock import stock_class
from tests.conftest import ROOT
from training.config.batch_plan import make_plan
from training.config.train_config import PLUMBING_KEYS, Run, load_run
from training.hardware.gpus import known_gpus
from training.planning.memory_model import MemoryModel, gpu_bytes
from training.planning.price_list import MACHINES, read_machines
from training.planning.throughput import throughputs

MLP = {"activation", "mlp_width"}
RUNS = {
    "speedrun-8xh100": (8, "h100-80gb", "NanoChatForCausalLM"),
    "speedrun-8xa100": (8, "a100-40gb", "NanoChatForCausalLM"),
    "speedrun-1xh100": (1, "h100-80gb", "NanoChatForCausalLM"),
    "speedrun-1xrtx3090": (1, "rtx3090-24gb", "NanoChatForCausalLM"),
    "speedrun-qwen3-8xh100": (8, "h100-80gb", "Qwen3ForCausalLM"),
}


def load_shipped_run(name: str) -> Run:
    return load_run(ROOT / "runs" / name, [])


@pytest.mark.parametrize(("name", "world_size", "gpu", "stock"), [(name, *facts) for name, facts in RUNS.items()])
def test_speedruns_follow_the_record_and_fit_their_gpus(name: str, world_size: int, gpu: str, stock: str) -> None:
    run, reference = load_shipped_run(name), load_shipped_run("speedrun-8xh100")
    recipe, reference_recipe = (
        {key: value for key, value in config.train.flat().items() if key not in PLUMBING_KEYS}
        for config in (run, reference)
    )
    assert recipe == reference_recipe
    network, reference_network = attrs.asdict(run.model), attrs.asdict(reference.model)
    changed_keys = {key for key in network if network[key] != reference_network[key]}
    assert changed_keys == (MLP if "qwen3" in name else set())
    assert stock_class(run.model).name == stock
    predicted = MemoryModel.of(run.model, run.train, world_size).predict(run.train.batch.microbatch_size)
    assert predicted.total < gpu_bytes(known_gpus()[gpu])
    plan = make_plan(run.train, run.model.context_length, world_size)
    # The steps and the decay are the same as in the record.
    assert (plan.steps, plan.tokens_per_step) == (4578, 524_288)
    assert (plan.schedule.warmup_steps, plan.schedule.decay_steps, plan.schedule.final_fraction) == (0, 1308, 0.0)
    assert plan.validation_sequences * run.model.context_length == 10_485_760  # fineweb-val-10m


def test_plan_shows_the_speed_of_the_records_trainer() -> None:
    machine = read_machines(MACHINES, ["8xh100-80gb"]).machines[0]
    # The first throughput, which is not used here, is the estimate. It is 12% lower than the record.
    _, record = throughputs(load_shipped_run("speedrun-8xh100").model, machine)
    assert (record.tokens_per_second, record.trainer) == (3_695_552, "KellerJordan/modded-nanogpt")
    qwen3_throughputs = throughputs(load_shipped_run("speedrun-qwen3-8xh100").model, machine)
    assert [throughput.kind for throughput in qwen3_throughputs] == ["estimate"]
