"""Tensor files: ranks write their shards without gathering them, no pickle is read, and wrong files are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from common.files import sha256
from tests.conftest import MakeRun, complete, metrics, one_line, seal_again, train
from tests.model.architectures import NANOCHAT, QWEN3
from tests.training.checkpoints.conftest import FILES
from tests.walks import events
from training.checkpoints.directory import OPTIMIZER, WEIGHTS
from training.checkpoints.saved_state import combined_sha256

NETWORK_DISK = Path(__file__).with_name("network_disk.py")

# Prints how many collectives run while the state is copied for a save.
WATCHED = """
from torch.distributed.tensor.debug import CommDebugMode

from training.checkpoints.tensor_files import StateShard

stage = StateShard.stage


def watched(shard):
    with CommDebugMode() as communication:
        stage(shard)
    # Written in one piece, because another rank writes to the same pipe.
    print(f"collectives in a save's copy: {communication.get_total_counts()}\\n", end="", flush=True)


StateShard.stage = watched
"""


def test_sharded_save_gathers_nothing(make_run: MakeRun, changed_train: Callable[[str], Path]) -> None:
    done = complete(make_run(parallel="fsdp"), ranks=2, script=changed_train(WATCHED))
    counts = [line for line in done.stdout.splitlines() if line.startswith("collectives in a save's copy: ")]
    assert counts == ["collectives in a save's copy: 0"] * 4  # two saves on two ranks


WITHOUT_PICKLE = """
import pickle


def refuse(*_, **__):
    raise AssertionError("a pickle is read from a file")


# torch's collectives still work: they unpickle only from memory, and have their own reference to the class.
pickle.load = pickle.Unpickler = torch.load = refuse
"""


@pytest.mark.slow
def test_no_pickle_is_read(copied: Path, changed_train: Callable[[str], Path]) -> None:
    script = changed_train(WITHOUT_PICKLE)
    for ranks, parallel, last in ((1, "ddp", "6"), (2, "ddp", "7"), (2, "fsdp", "8")):
        options = ("--max-steps", last, "--set", f"parallel={parallel}")
        resume = ("--resume", "step-00000004") if last == "6" else ()
        done = complete(copied, *resume, *options, ranks=ranks, script=script)
        assert "resuming from" in done.stdout
    assert {path.name for path in (copied / "checkpoints" / "step-00000008").iterdir()} == set(FILES)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("content", [b"\x80\x04N.", b"[" * 100_000, "other shapes"])
def test_file_with_other_tensors_is_refused(copied: Path, name: str, content: bytes | str) -> None:
    file = (copied / "checkpoints" / "latest").resolve() / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        tensors = load_file(file)
        save_file({key: tensor[:1] for key, tensor in tensors.items()}, file)
    seal_again(file.parent)
    done = train(copied, "--set", "min_train_tokens=3000")
    assert one_line(done).startswith(f"train.py: {file}: ") and "Traceback" not in done.stderr
    assert ("cannot be read" if isinstance(content, bytes) else "got F32 [1") in done.stderr


def on_network_disk(run: Path, *options: str, later_node: int, **environment: str) -> None:
    """Train on two nodes that share a network disk, with two ranks on each."""
    caches = run.with_name("clients")
    caches.mkdir(exist_ok=True)
    nodes = {"NODE_SIZE": "2", "CLIENTS": str(caches), "LATER_NODE": str(later_node)}
    complete(run, *options, ranks=4, script=NETWORK_DISK, environment=nodes | environment)


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("ddp", marks=SLOW), pytest.param("hsdp", marks=SLOW)])
@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ({}, {}),
        pytest.param(NANOCHAT, {"optimizer": "muon", "precision": "bf16"}, marks=SLOW),
        pytest.param(QWEN3 | {"n_kv_heads": 1, "mlp_width": 100, "emb_dim": 40}, {}, marks=SLOW),
    ],
    ids=["GPT-2", "NanoChat", "Qwen3"],
)
def test_checkpoint_on_a_network_disk_is_correct(
    make_run: MakeRun, model: dict[str, Any], keys: dict[str, Any], parallel: str
) -> None:
    run = make_run(model=model, parallel=parallel, keep_checkpoints=2, **keys)
    for later_node, last in ((0, "4"), (1, "8")):  # the second job resumes
        on_network_disk(run, "--hash-every", "4", "--max-steps", last, later_node=later_node)
    in_memory = metrics(run, "state_sha256")
    for step in (4, 8):
        checkpoint = run / "checkpoints" / f"step-{step:08d}"
        digests = {name: sha256(checkpoint / name) for name in (WEIGHTS, OPTIMIZER)}
        assert combined_sha256(step, digests) == in_memory[step]


@pytest.mark.slow
def test_checkpoint_with_wrong_bytes_is_not_kept(make_run: MakeRun) -> None:
    run = make_run(parallel="fsdp")
    with pytest.raises(AssertionError, match="the last steps are not saved"):
        on_network_disk(run, later_node=0, WRONG_BYTE="1")
    [first, second] = events(run, "checkpoint-failed")
    assert "model.safetensors: cannot be written: bytes " in first["problem"]
    assert (run / "metrics.jsonl").exists() and not list((run / "checkpoints").iterdir())
    assert second["step"] == 8
