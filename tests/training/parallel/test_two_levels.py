"""Nodes: gradients added up inside them first, and HSDP, have the bits of one process; resumes across all layouts."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig
from model.counts import parameter_count
from tests.conftest import TINY_MODEL, metrics, train
from tests.machines import two_machines
from tests.model.architectures import NANOCHAT

AS_NODES = Path(__file__).with_name("as_nodes.py")
LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)]  # nodes, ranks of each


def train_on(run: Path, layout: tuple[int, int], parallel: str, *options: str) -> None:
    """Train on so many nodes of so many ranks."""
    nodes, size = layout
    arguments = ("--hash-every", "1", "--set", f"parallel={parallel}", *options)
    if nodes * size == 1:
        done = train(run, *arguments)
    else:
        environment = {"NODE_SIZE": str(size)}
        done = train(run, *arguments, ranks=nodes * size, script=AS_NODES, environment=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("parallel", ["ddp", "hsdp"])
def test_two_nodes_of_two_ranks_have_the_bits_of_one_process(make_run: Callable[..., Path], parallel: str) -> None:
    keys: dict[str, Any] = {"drop_rate": 0.1}
    alone, nodes = make_run("alone", keys), make_run("nodes", keys)
    train_on(alone, (1, 1), "ddp")
    train_on(nodes, (2, 2), parallel)
    assert metrics(nodes, "state_sha256") == metrics(alone, "state_sha256")
    assert metrics(nodes, "validation_loss") == metrics(alone, "validation_loss")


def test_without_determinism_hsdp_trains_as_well(make_run: Callable[..., Path]) -> None:
    alone, nodes = make_run("alone", determinism="off"), make_run("nodes", determinism="off")
    train_on(alone, (1, 1), "ddp")
    train_on(nodes, (2, 2), "hsdp")
    losses = metrics(alone, "train_loss")
    assert metrics(nodes, "train_loss") == {step: pytest.approx(loss, abs=1e-3) for step, loss in losses.items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ({"drop_rate": 0.1}, {"precision": "fp32"}),
        ({"drop_rate": 0.1}, {"precision": "bf16"}),
        (NANOCHAT, {"precision": "bf16", "optimizer": "muon"}),
    ],
    ids=["fp32", "bf16", "muon"],
)
def test_every_layout_has_one_hash_and_resumes_from_every_other(
    make_run: Callable[..., Path], model: dict[str, Any], keys: dict[str, Any]
) -> None:
    alone, passed_on = make_run("alone", model, **keys), make_run("passed-on", model, **keys)
    train_on(alone, (1, 1), "ddp")
    wanted = metrics(alone, "state_sha256")
    for layout, parallel in product(LAYOUTS, ("ddp", "fsdp", "hsdp")):
        run = make_run(f"{parallel}-{layout[0]}x{layout[1]}", model, **keys)
        train_on(run, layout, parallel)
        assert metrics(run, "state_sha256") == wanted, (layout, parallel)
    for step, (layout, parallel) in enumerate(
        [((2, 2), "hsdp"), ((2, 1), "hsdp"), ((1, 4), "fsdp"), ((2, 2), "ddp"), ((2, 2), "hsdp"), ((1, 1), "ddp")], 1
    ):
        train_on(passed_on, layout, parallel, "--max-steps", str(step))
    train_on(passed_on, (2, 2), "hsdp")
    assert metrics(passed_on, "state_sha256") == wanted


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "hsdp"])
def test_a_step_sends_no_more_between_nodes_than_it_must(
    make_run: Callable[..., Path], tmp_path: Path, parallel: str
) -> None:
    model = {"emb_dim": 128, "n_layers": 4}
    parameters = parameter_count(ModelConfig(**TINY_MODEL | model))
    sent: dict[int, int] = {}
    with two_machines(tmp_path) as machines:
        for steps in (10, 40):
            run = make_run(f"{steps}", model, min_train_tokens=40 * 8 * 32, validation_interval=None)
            before = machines[0].sent_bytes()
            options = ("--max-steps", str(steps), "--set", f"parallel={parallel}")
            nodes = [machine.train(run, *options, master=machines[0].address, ranks=2) for machine in machines]
            outputs = [node.communicate(timeout=300) for node in nodes]
            assert [node.returncode for node in nodes] == [0, 0], outputs
            sent[steps] = machines[0].sent_bytes() - before
    least = 4 * parameters  # 2 (R - 1) / R of the fp32 gradients, R = 2 nodes
    print(f"{parallel}: {(sent[40] - sent[10]) / 30 / least:.3f} of the least")
    assert least <= (sent[40] - sent[10]) / 30 <= 1.1 * least
