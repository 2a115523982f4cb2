"""Compiled networks: the number of graphs does not grow with the number of layers, for any architecture."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import jaxtyping
import pytest
import torch

from model.config import ModelConfig
from model.gpt import GPT, initialize
from model.loss import NextTokenLoss
from tests.model.architectures import MODERN
from tests.model.test_gpt import SMALL
from tests.training.parallel.conftest import as_rank, default_ranks
from training.parallel.wrap import parallelize
from training.precision import Numerics, autocast

CPU = torch.device("cpu")
GPT2 = attrs.evolve(SMALL, drop_rate=0.1, activation="gelu", norm_eps=1e-6, rope_base=500.0)
ZEROS = attrs.evolve(MODERN["Qwen3"], tie_weights=False, zero_init_projections=True, zero_init_head=True)
NETWORKS: dict[str, ModelConfig] = MODERN | {"GPT-2": GPT2, "Qwen3": ZEROS}
THRIFT = {"recompute_blocks": True, "chunks": 5}
TRAINED, VALIDATED = ("blocks", "head and loss"), ("blocks", "losses of sequences")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Return a list that collects every compiled graph. Graphs run as they are, without generated code."""
    compiled_graphs: list[torch.fx.GraphModule] = []

    def run_uncompiled(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compiled_graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=run_uncompiled))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # its shape checks would become part of the graphs
    torch._dynamo.reset()
    return compiled_graphs


def train_and_validate(config: ModelConfig, kind: str, compiled: bool | str = True, **memory: Any) -> None:
    network = GPT(attrs.evolve(config, n_layers=12))
    initialize(network, 0)
    numerics = Numerics(determinism="off", precision="bf16", compiled=compiled)
    parallel = parallelize(NextTokenLoss(network, **memory), kind, numerics, 2, default_ranks())
    tokens = torch.zeros(2, config.context_length, dtype=torch.int64)
    for _ in range(2):
        for last in (False, True):
            with parallel.gradient_sync(enabled=last), autocast("bf16", CPU):
                parallel.model(tokens, tokens).backward()
        parallel.zero_grad()
        parallel.model.eval()
        with torch.no_grad(), autocast("bf16", CPU):
            parallel.model(tokens, tokens, by_sequence=True)
        parallel.model.train()


SLOW = pytest.mark.slow


def test_these_networks_cover_every_option() -> None:
    for field in attrs.fields(ModelConfig):
        assert any(getattr(config, field.name) != field.default for config in NETWORKS.values()), field.name


@pytest.mark.parametrize(
    ("name", "kind", "memory", "count"),
    [
        ("no stock class", "fsdp", {}, len(TRAINED + VALIDATED)),
        *(pytest.param(name, "ddp", {}, len(TRAINED + VALIDATED), marks=SLOW) for name in NETWORKS),
        # The last chunk has fewer tokens, and therefore a graph of its own.
        pytest.param("no stock class", "ddp", THRIFT, len(TRAINED + VALIDATED) + 1, marks=SLOW),
    ],
)
def test_blocks_of_all_layers_share_a_graph(
    graphs: list[torch.fx.GraphModule], name: str, kind: str, memory: dict[str, Any], count: int
) -> None:
    with as_rank(0, of=2 if kind == "fsdp" else 1):  # on one rank, FSDP does not wrap the network
        train_and_validate(NETWORKS[name], kind, **memory)
    assert len(graphs) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_compiled_whole_have_two_graphs(graphs: list[torch.fx.GraphModule], name: str) -> None:
    with as_rank(0, of=1):
        train_and_validate(NETWORKS[name], "ddp", "model")
    assert len(graphs) == 2  # one for training, one for validation


@pytest.mark.slow
def test_inductor_compiles_the_blocks_of_all_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with as_rank(0, of=1):
        train_and_validate(NETWORKS["no stock class"], "ddp")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(TRAINED + VALIDATED)
