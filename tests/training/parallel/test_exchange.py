"""The exchange of partial sums in real process groups gives the same bits as one process, even with two levels."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.counts import parameter_count
from tests.conftest import TINY_MODEL, MakeRun, slow
from tests.machines import two_machines
from tests.training.parallel.conftest import MakeGroup, on_threads
from tests.training.parallel.test_ordered_reduce import leaves, tree_sum
from tokens.batches.sampling import odd_factor, rank_shares
from training.parallel import exchange
from training.parallel.exchange import exchanges, ordered_all_reduce, ordered_reduce_scatter
from training.parallel.mesh import Levels
from training.parallel.ordered_reduce import LeafSum
from training.parallel.process_group import ALONE, RankGroup
from training.parallel.sum_tree import step_tree


@pytest.mark.parametrize(
    ("nodes", "size"),
    [(1, 1), (1, 3), (1, 4), (2, 2), (3, 2), *slow((1, 2), (1, 5), (1, 7), (2, 3), (2, 4), (3, 4))],
)
@pytest.mark.parametrize(("piece", "length"), [(10, 1), (7, 23), *slow((10, 24), (1000, 23))])
def test_all_ranks_get_the_bits_of_one_process(
    nodes: int, size: int, piece: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PIECE", piece)
    for count in (nodes * size, 12, 16, 37):
        leaf_values = leaves(count, 23)[:, :length].clone()
        leaf_values[:, 0] = -0.0  # negative zeros must be preserved
        expected = tree_sum(list(leaf_values), odd_factor(count)).numpy().tobytes()
        for rank, rank_sum in enumerate(sums_of_ranks(leaf_values, nodes, size)):
            assert rank_sum.numpy().tobytes() == expected, (count, rank)


def sums_of_ranks(leaf_values: Tensor, nodes: int, size: int) -> list[Tensor]:
    """Add all leaves. Return the sum that each rank gets. `leaf_values` has the shape (leaves, elements)."""
    ranks = nodes * size
    tree, shares = step_tree("elastic", len(leaf_values), ranks), rank_shares(len(leaf_values), ranks)

    def work(rank: int, group: MakeGroup) -> Tensor:
        node, place = divmod(rank, size)
        across = group(f"place {place}", node, nodes) if nodes > 1 else ALONE
        levels = Levels(inside=group(f"node {node}", place, size), across=across)
        *separate, last = partial_sums(leaf_values, ranks, rank)
        total = torch.cat(last)
        ordered_all_reduce(total, separate, exchanges(tree, shares, levels))
        return total

    return on_threads(work, ranks)


def test_a_rank_gets_its_part_of_the_sum() -> None:
    leaf_values, tree, shares = leaves(8, 0), step_tree("elastic", 8, 3), rank_shares(8, 3)

    def work(rank: int, group: MakeGroup) -> Tensor:
        levels = exchanges(tree, shares, Levels(inside=group("all", rank, 3)))
        sums = [torch.cat(halves) for halves in partial_sums(leaf_values, 3, rank)]
        received = torch.empty(levels[0].received_elements(33))
        part = ordered_reduce_scatter(sums, received, levels)
        assert part.untyped_storage().data_ptr() == received.untyped_storage().data_ptr()
        return part

    assert torch.equal(torch.cat(on_threads(work, 3)), tree_sum(list(leaf_values), 1))


def test_equal_subtrees_need_one_partial_sum_per_rank() -> None:
    four, three = (Levels(inside=RankGroup(rank=0, size=size, group=0)) for size in (4, 3))
    [even] = exchanges(step_tree("elastic", 8, 4), rank_shares(8, 4), four)
    assert (even.counts, even.received_elements(40)) == ([1, 1, 1, 1], 40)
    [uneven] = exchanges(step_tree("elastic", 8, 3), rank_shares(8, 3), three)
    assert (uneven.counts, uneven.received_elements(30)) == ([1, 2, 2], 50)
    [alone] = exchanges(step_tree("elastic", 8, 1), rank_shares(8, 1), Levels(inside=ALONE))
    assert (alone.counts, alone.rounds, alone.results) == ([1], [], [0])


def partial_sums(leaf_values: Tensor, ranks: int, rank: int) -> list[list[Tensor]]:
    """Return a rank's partial sums. Each is a list of tensors of up to 9 elements, like gradients of parameters."""
    share = rank_shares(len(leaf_values), ranks)[rank]
    total = LeafSum(step_tree("elastic", len(leaf_values), ranks), share)
    *first, last = [[tensor.clone() for tensor in leaf_values[number].split(9)] for number in share]
    for gradients in first:
        total.add(gradients)
    separate, joined = total.take()
    for earlier in joined:
        torch._foreach_add_(last, earlier)
    return [*separate, last]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "hsdp"])
def test_traffic_between_nodes_is_minimal(make_run: MakeRun, tmp_path: Path, parallel: str) -> None:
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
    minimum = 4 * parameters  # 2 (R - 1) / R times the bytes of the fp32 gradients, with R = 2 nodes
    print(f"{parallel}: {(sent[40] - sent[10]) / 30 / minimum:.3f} of the minimum")
    assert minimum <= (sent[40] - sent[10]) / 30 <= 1.1 * minimum
