"""Process groups: ranks exchange values and errors, in a single process and in two."""

import json
import socket
from pathlib import Path

import pytest
import torch

from common.errors import BadInput
from tests import launch
from training.parallel import process_group

MEMBER = """
import json, sys
from common.errors import BadInput
from training.parallel.process_group import ALONE, from_coordinator, gather, start, stop, together

ranks = start("cpu", 60)

def fail_on_rank_1():
    if ranks.rank == 1:
        raise BadInput("rank 1 cannot")
    return "can"

def missing():
    return open("/nonexistent/file") if ranks.rank == 0 else None

report = {"ranks": gather(ranks, ranks.rank), "first": from_coordinator(ranks, lambda: f"from {ranks.rank}")}
for name, work in (("refused", fail_on_rank_1), ("system", missing)):
    try:
        together(ranks, work)
    except BadInput as error:
        report[name] = str(error)
open(f"{sys.argv[1]}/{ranks.rank}.json", "w").write(json.dumps(report))
stop()
"""


def test_a_process_without_a_launcher_is_a_group_of_one(alone: process_group.Ranks) -> None:
    assert (alone.rank, alone.world_size, alone.coordinates) == (0, 1, True)
    assert alone.node == alone.data_parallel == process_group.ALONE
    assert process_group.gather(alone, "x") == ["x"]
    assert process_group.from_coordinator(alone, lambda: 5) == 5


def test_tensor_parallel_must_divide_the_ranks_per_node() -> None:
    with pytest.raises(BadInput, match="tensor_parallel: got 2, wanted a divisor of 1, the number of ranks per node"):
        process_group.start("cpu", 60, 2)


def test_a_busy_port_of_rank_0_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("0.0.0.0", 0)) as busy:
        port = str(busy.getsockname()[1])
        places = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in places.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(BadInput, match=f"rank 0 cannot listen on MASTER_PORT {port}; set another port for all"):
            process_group._rendezvous()


def test_errors_without_a_file_are_not_user_errors(alone: process_group.Ranks) -> None:
    def lose_connection() -> None:
        raise ConnectionError("lost")

    with pytest.raises(ConnectionError):
        process_group.together(alone, lose_connection)


def test_bad_input_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    process = launch.run(script, str(tmp_path), ranks=2)
    assert process.returncode == 0, process.stderr
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert reports[0] == reports[1]
    assert reports[0].pop("system").startswith("/nonexistent/file: ")
    assert reports[0] == {"ranks": [0, 1], "first": "from 0", "refused": "rank 1 cannot"}


def test_too_many_ranks_are_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "choose_device", lambda kind: "cuda")
    monkeypatch.setattr(process_group.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(BadInput, match=r"got 2 GPUs for 4 ranks on this machine; .* --nproc_per_node=2$"):
        process_group.start("cuda", 60)


def test_members_of_a_node_are_consecutive_ranks() -> None:
    groups = {"node": process_group.RankGroup(rank=1, size=3), "all": process_group.RankGroup(rank=5, size=8)}
    ranks = process_group.Ranks(rank=5, world_size=8, device=torch.device("cpu"), control=None, download=None)
    assert {name: [*process_group.members(ranks, group)] for name, group in groups.items()} == {
        "node": [4, 5, 6],
        "all": [*range(8)],
    }
