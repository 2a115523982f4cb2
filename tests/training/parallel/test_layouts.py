"""Bits of real runs: each variant of training gives the same numbers on every layout as in one process.

This is also true for runs that are killed and continued on another layout. Numbers are compared only within one
execution of these tests, and never with recorded numbers, because another version of torch or another CPU gives
different bits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.conftest import complete, metrics, slow, train, write_run
from tests.model.architectures import MUON_RECIPE, NANOCHAT, QWEN3, SWIGLU
from tests.training.checkpoints.conftest import CRASH
from tests.walks import final_hash

AS_NODES = Path(__file__).with_name("as_nodes.py")
NUMBERS = ("state_sha256", "train_loss", "grad_norm", "validation_loss")
STEPS = 4

# A network that is larger than DDP's first bucket (1 MiB) and has an untied head. The rows and columns of its
# parameters cannot be divided evenly among most numbers of ranks.
WIDE = {"drop_rate": 0.1, "tie_weights": False, "emb_dim": 134, "context_length": 30}
HEADS = {"context_length": 30, "emb_dim": 136, "n_heads": 4, "n_kv_heads": 2}
ONE_LAYER = {"n_layers": 1}
SHARED_LAYERS = HEADS | {"context_length": 32}  # four tensor shards get equal parts, but share keys and values
ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of compiler processes, which would each import torch


@attrs.frozen(kw_only=True)
class Variant:
    """A kind of run: its keys of model.json and train.json, and its environment variables."""

    model: dict[str, Any] = attrs.field(factory=lambda: {"drop_rate": 0.1})
    train: dict[str, Any] = attrs.field(factory=dict)
    environment: dict[str, str] = attrs.field(factory=dict)
    microbatches: int = 8  # number of micro-batches in a step; each has two sequences

    def write(self, directory: Path, token_files: Path, few: Path, answers: Path) -> Path:
        """Write the run directory. A mixture also reads `few`, and the objective "answers" needs conversations."""
        model = {"context_length": 32} | self.model
        batch = 2 * self.microbatches
        keys = {"global_batch_size": batch, "min_train_tokens": STEPS * batch * model["context_length"]} | self.train
        if keys.get("max_epochs"):
            weights = [[0, 1], [2, 0.75]]  # two stages; `few` is read more than once
            parts = [{"dataset": str(token_files), "weight": [[0, 1], [2, 0.25]]}]
            keys["dataset"] = [*parts, {"dataset": str(few), "weight": weights}]
        if keys.get("objective"):
            keys["dataset"] = [{"dataset": str(answers), "weight": 3}, {"dataset": str(few), "weight": 1}]
        return write_run(directory, token_files, model, checkpoint_interval=2, **keys)


VARIANTS = {
    "fp32": Variant(model=WIDE, train={"precision": "fp32"}),
    "bf16": Variant(model=WIDE, train={"precision": "bf16"}),
    "fp16, six layers": Variant(model={"drop_rate": 0.1, "n_layers": 6}, train={"precision": "fp16"}),
    "bf16, six layers": Variant(model={"drop_rate": 0.1, "n_layers": 6}, train={"precision": "bf16"}),
    "NanoChat with Muon": Variant(
        model=NANOCHAT | HEADS | {"logit_softcap": 15.0}, train={"precision": "bf16"} | MUON_RECIPE
    ),
    "GPT-2 with Muon": Variant(model=WIDE, train={"optimizer": "muon"}),
    "Qwen3": Variant(model=QWEN3 | HEADS | {"mlp_width": 100}, train={"precision": "bf16"}),
    "thrifty memory": Variant(
        model={"drop_rate": 0.1, "tie_weights": False},
        train={"precision": "bf16", "recompute_blocks": True, "loss_chunks": 3},
    ),
    "plain": Variant(model=ONE_LAYER),
    "plain bf16": Variant(model=ONE_LAYER, train={"precision": "bf16"}),
    "plain fp16": Variant(model=ONE_LAYER, train={"precision": "fp16"}),
    "compiled": Variant(model=ONE_LAYER, train={"compile": True}, environment=ONE_COMPILER),
    "compiled bf16": Variant(model=ONE_LAYER, train={"precision": "bf16", "compile": True}, environment=ONE_COMPILER),
    "compiled as one graph": Variant(model=ONE_LAYER, train={"compile": "model"}, environment=ONE_COMPILER),
    "mixture": Variant(train={"shuffle": True, "max_epochs": 2}),
    "answers": Variant(train={"objective": "answers", "shuffle": True}),
    "answers, thrifty memory": Variant(
        train={"objective": "answers", "precision": "bf16", "recompute_blocks": True, "loss_chunks": 3}
    ),
    "answers, compiled": Variant(
        model=ONE_LAYER, train={"objective": "answers", "compile": True}, environment=ONE_COMPILER
    ),
    "5 micro-batches": Variant(microbatches=5),
    "6 micro-batches": Variant(microbatches=6),
    "12 micro-batches": Variant(microbatches=12),
}
GPT2 = SHARED_LAYERS | {"drop_rate": 0.1, "tie_weights": False, "n_kv_heads": None}
LLAMA, MUON = SHARED_LAYERS | SWIGLU | {"mlp_width": 100}, SHARED_LAYERS | NANOCHAT | {"logit_softcap": 15.0}
VARIANTS |= {
    f"{name} in 4 shards, {precision}": Variant(
        model=model, train=train | {"tensor_shards": 4, "precision": precision}, microbatches=6
    )
    for name, model, train in (("GPT-2", GPT2, {}), ("Llama", LLAMA, {}), ("NanoChat", MUON, MUON_RECIPE))
    for precision in ("fp32", "bf16")
}
VARIANTS["compiled in 4 shards"] = Variant(
    model=GPT2 | ONE_LAYER, train={"tensor_shards": 4, "compile": True, "loss_chunks": 3}, environment=ONE_COMPILER
)
# A layout is written as nodes x ranks per node, then the value of "parallel", and then "tp" with the value of
# "tensor_parallel". The last part is left out if this value is 1.
EVEN = (
    "1x2 ddp",
    "1x2 fsdp",
    "1x4 ddp",
    "1x4 fsdp",
    "1x4 hsdp",
    "1x8 ddp",
    "1x8 fsdp",
    "2x1 hsdp",
    "2x2 ddp",
    "2x2 fsdp",
    "2x2 hsdp",
)
UNEVEN = ("1x3 ddp", "1x3 fsdp", "1x5 ddp", "1x5 fsdp", "1x6 ddp", "1x6 fsdp", "1x7 ddp", "1x7 fsdp")
UNEVEN_NODES = ("3x2 ddp", "3x2 hsdp", "2x3 ddp", "2x3 hsdp")
LAYOUTS = {
    **dict.fromkeys(("fp32", "bf16", "NanoChat with Muon"), EVEN + UNEVEN + UNEVEN_NODES),
    **dict.fromkeys(("fp16, six layers", "bf16, six layers", "compiled bf16"), ("1x2 fsdp",)),
    "compiled": ("1x2 ddp", "1x2 fsdp"),
    "compiled as one graph": ("1x2 ddp",),
    **dict.fromkeys(("Qwen3", "thrifty memory", "mixture"), ("1x2 ddp", "1x2 fsdp", "2x2 hsdp")),
    "GPT-2 with Muon": ("1x3 ddp", "1x4 fsdp"),
    "answers": ("1x2 ddp", "1x2 fsdp", "1x3 ddp", "1x3 fsdp", "1x4 ddp", "1x4 fsdp", "2x2 hsdp"),
    "answers, thrifty memory": ("1x2 fsdp", "1x3 ddp"),
    "answers, compiled": ("1x2 fsdp",),
    "5 micro-batches": ("1x2 fsdp", "1x3 ddp", "1x5 fsdp"),
    "6 micro-batches": ("1x2 fsdp", "1x4 ddp", "1x4 fsdp", "1x6 ddp", "3x2 hsdp"),
    "12 micro-batches": ("1x3 ddp", "1x3 fsdp", "1x5 ddp", "2x3 hsdp"),
    # There are five settings: the number of tensor ranks (1, 2, 4), the number of data-parallel ranks (1, 2, 3), the
    # wrapper, the network and the precision. For any two settings, each pair of values occurs in one of these layouts.
    "GPT-2 in 4 shards, fp32": ("1x2 fsdp tp2", "1x6 ddp tp2", "1x8 fsdp tp4"),
    "GPT-2 in 4 shards, bf16": ("2x2 hsdp",),
    "Llama in 4 shards, fp32": ("1x2 ddp",),
    "Llama in 4 shards, bf16": ("1x2 ddp tp2", "2x2 hsdp tp2", "1x12 fsdp tp4"),
    "NanoChat in 4 shards, fp32": ("1x3 fsdp", "2x4 hsdp tp2"),
    "NanoChat in 4 shards, bf16": ("1x4 ddp tp4", "2x4 hsdp tp4"),
    "compiled in 4 shards": ("1x2 fsdp tp2",),
}
FAST = [*(("fp32", layout) for layout in ("1x3 ddp", "2x2 hsdp")), ("answers", "1x3 fsdp")]
FAST.append(("Llama in 4 shards, bf16", "2x2 hsdp tp2"))
# This case is started as a user would start it, from a command line. Its ranks are new interpreters, not forks.
AS_USER = ("fp32", "1x2 fsdp")
CASES = [
    pytest.param(variant, layout, marks=() if (variant, layout) in FAST else pytest.mark.slow)
    for variant, layouts in LAYOUTS.items()
    for layout in layouts
]
# Each run uses three layouts, one after the other. The first layout has one node. There, the run is killed while it
# saves at step 4. It continues on the second and the third layout.
HANDOVERS = {
    "fp32": ("1x4 fsdp", "2x2 hsdp", "1x1 ddp"),
    "bf16": ("1x3 ddp", "3x2 hsdp", "1x5 fsdp"),
    "NanoChat with Muon": ("1x4 fsdp", "2x2 ddp", "1x2 ddp"),
    "mixture": ("1x2 ddp", "1x1 ddp", "1x2 fsdp"),
    "answers": ("1x4 fsdp", "1x3 ddp", "1x2 fsdp"),
    "GPT-2 in 4 shards, fp32": ("1x4 fsdp tp2", "1x4 ddp tp4", "1x2 fsdp"),
    "Llama in 4 shards, bf16": ("1x2 ddp", "2x2 hsdp tp2", "1x4 fsdp tp4"),
    "NanoChat in 4 shards, bf16": ("1x4 ddp tp4", "2x2 hsdp", "1x4 fsdp tp2"),
}

Numbers = list[dict[int, Any]]
WriteVariant = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory, token_files: Path, few: Path, answers: Path) -> WriteVariant:
    """Return a function that writes the run directory of a variant.

    Its second argument is the name of the new folder for this directory.
    """
    directories = token_files, few, answers
    return lambda variant, name: VARIANTS[variant].write(tmp_path_factory.mktemp(name) / "run", *directories)


@pytest.fixture(scope="module")
def reference(write: WriteVariant) -> Callable[[str], Numbers]:
    """Return a function that trains a variant in one process, but only once, and returns its numbers."""
    results: dict[str, Numbers] = {}

    def numbers(variant: str) -> Numbers:
        if variant not in results:
            run = write(variant, "alone")
            train_on(run, variant, "1x1 ddp")
            results[variant] = numbers_of(run)
            assert len(set(results[variant][0].values())) == STEPS  # the state changed at every step
        return results[variant]

    return numbers


def train_on(run: Path, variant: str, layout: str, *options: str, as_user: bool = False) -> str:
    """Train on a layout, and return the output of the run."""
    nodes, size, keys = read_layout(layout)
    arguments = ("--hash-every", "1", *keys, *options)
    environment = {"NODE_SIZE": str(size)} | VARIANTS[variant].environment
    script = {} if as_user else {"script": AS_NODES}
    process = complete(run, *arguments, ranks=nodes * size, environment=environment, as_user=as_user, **script)
    return str(process.stdout)


def read_layout(layout: str) -> tuple[int, int, list[str]]:
    """Return the number of nodes, the number of ranks per node, and the options of train.py."""
    shape, parallel, tensor_parallel = (*layout.split(), "tp1")[:3]
    nodes, size = map(int, shape.split("x"))
    return nodes, size, ["--set", f"parallel={parallel}", "--set", f"tensor_parallel={tensor_parallel[2:]}"]


def numbers_of(run: Path) -> Numbers:
    results = [metrics(run, key) for key in NUMBERS]
    assert final_hash(run) == results[0][STEPS]  # the files have the same hash as the state in memory
    return results


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_layouts_give_the_results_of_one_process(
    write: WriteVariant, reference: Callable[[str], Numbers], variant: str, layout: str
) -> None:
    run = write(variant, "laid-out")
    printed = train_on(run, variant, layout, as_user=(variant, layout) == AS_USER)
    assert "determinism elastic" in printed
    assert numbers_of(run) == reference(variant)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", HANDOVERS)
def test_killed_runs_give_the_results_of_one_process(
    write: WriteVariant, reference: Callable[[str], Numbers], variant: str
) -> None:
    run, (first, *later_layouts) = write(variant, "handed-on"), HANDOVERS[variant]
    _, size, keys = read_layout(first)
    crash = {"CRASH_AT": "write weights", "CRASH_SAVE": "2"}
    killed_process = train(run, "--hash-every", "1", *keys, ranks=size, script=CRASH, environment=crash)
    assert killed_process.returncode == 1
    for step, layout in enumerate(later_layouts, STEPS - len(later_layouts) + 1):
        assert "resuming from" in train_on(run, variant, layout, "--max-steps", str(step))
    *results, validated = numbers_of(run)
    *expected, losses = reference(variant)
    assert results == expected
    assert losses.items() <= validated.items()  # `validated` has more, because each job validates at its end


# A script that resumes a run on a new layout, and prints the hash of the state that it has loaded.
PRINT_LOADED_STATE = """
from training import resume
from training.checkpoints.tensor_files import state_sha256

plain_load = resume.load_checkpoint


def load_and_print(checkpoint, request, state, ranks):
    loaded = plain_load(checkpoint, request, state, ranks)
    digest = state_sha256(state, ranks)
    if ranks.coordinates:
        print(f"loaded {digest}\\n", end="", flush=True)
    return loaded


resume.load_checkpoint = load_and_print
"""


@pytest.mark.slow
def test_checkpoints_load_with_any_number_of_tensor_shards(
    write: WriteVariant, reference: Callable[[str], Numbers], changed_train: Callable[[str], Path]
) -> None:
    variant = "Llama in 4 shards, fp32"
    run, script, numbers = write(variant, "shards"), changed_train(PRINT_LOADED_STATE), []
    for step, layout in enumerate(("1x1 ddp", "1x2 ddp tp2", "1x4 fsdp tp4", "1x2 fsdp"), 1):
        _, size, keys = read_layout(layout)  # with tensor_shards null, there is one shard per tensor rank
        options = ("--set", "tensor_shards=null", "--allow-numerics-drift", "--max-steps", str(step))
        process = complete(run, *keys, *options, ranks=size, script=script)
        assert [line for line in process.stdout.splitlines() if line.startswith("loaded")] == numbers[-1:]
        numbers.append(f"loaded {final_hash(run)}")
    assert metrics(run, "train_loss") == pytest.approx(reference(variant)[1], rel=1e-3)


@pytest.mark.parametrize(
    ("variant", "tolerance"),
    [("plain bf16", 0.02), *slow(("plain fp16", 0.02), ("compiled", 1e-5), ("compiled as one graph", 1e-5))],
)
def test_compiled_and_low_precision_runs_train_similarly(
    reference: Callable[[str], Numbers], variant: str, tolerance: float
) -> None:
    losses, plain = reference(variant)[1], reference("plain")[1]
    assert losses == pytest.approx(plain, rel=tolerance)
    assert losses != plain or variant.startswith("compiled")


@pytest.mark.slow
def test_run_level_repeats_with_the_same_ranks(write: WriteVariant) -> None:
    # DDP regroups its buckets after the first step of a process. If sums depended on the order of the buckets, the
    # bits would differ.
    numbers_of_runs = []
    for layout, stops in (("1x3 ddp", "4"), ("1x3 ddp", "24"), ("1x3 fsdp", "4"), ("3x1 hsdp", "4")):
        run = write("12 micro-batches", "run-level")
        for stop in stops:
            train_on(run, "12 micro-batches", layout, "--set", "determinism=run", "--max-steps", stop)
        numbers_of_runs.append(numbers_of(run))
    assert all(numbers_of_run == numbers_of_runs[0] for numbers_of_run in numbers_of_runs)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2x2 hsdp", *UNEVEN[:2]])
def test_layouts_also_train_without_determinism(
    write: WriteVariant, reference: Callable[[str], Numbers], layout: str
) -> None:
    run = write("fp32", "off")
    train_on(run, "fp32", layout, "--set", "determinism=off")
    for key, expected in zip(NUMBERS[1:], reference("fp32")[1:], strict=True):
        assert metrics(run, key) == pytest.approx(expected, rel=1e-4), key


@pytest.mark.slow
def test_without_elastic_the_number_of_ranks_matters(write: WriteVariant) -> None:
    # The number of ranks matters even for this small model, so the equality in the other tests is no accident.
    hashes = []
    for layout in ("1x1 ddp", "1x4 ddp"):
        run = write("fp32", "ranks-show")
        train_on(run, "fp32", layout, "--set", "determinism=run")
        hashes.append(final_hash(run))
    assert hashes[0] != hashes[1]
