"""Batch-size search: it finds any limit quickly, candidates keep the global batch, and --predict needs no GPU."""

import math
import re

from model.config import ModelConfig
from tests import launch
from tests.conftest import ROOT, TINY_MODEL, MakeRun
from training.config.train_config import load_run
from training.hardware.gpus import known_gpus
from training.planning.batch_search import candidates, largest_unchanged, next_candidate, prediction_table


def test_search_finds_any_limit_in_few_trials(make_run: MakeRun) -> None:
    sizes = candidates(load_run(make_run(), ["global_batch_size=null"]).train, 2)
    for limit in (0, 1, 2, 30, 100, 333, 5000):
        for guess in (None, 1, 3, 100, 4000):
            fits, fails, trials = 0, math.inf, 0
            while (size := next_candidate(sizes, fits, fails, guess)) is not None:
                fits, fails, trials = (size, fails, trials + 1) if size <= limit else (fits, size, trials + 1)
            assert fits == max((size for size in sizes if size <= limit), default=0)
            assert trials <= (3 if limit == guess else 20), (limit, guess)


def test_candidates_do_not_change_the_global_batch(make_run: MakeRun) -> None:
    train = load_run(make_run(global_batch_size=24), []).train
    assert candidates(train, 2) == [1, 2, 3, 4, 6, 12]
    assert largest_unchanged(train.batch, 2, 5) == 4
    shared = train.replace(tensor_parallel=4)
    assert candidates(shared, 8) == [1, 2, 3, 4, 6, 12]
    table = prediction_table(ModelConfig(**TINY_MODEL | {"n_heads": 4}), shared, [known_gpus()["l4"]], 4)
    assert [line.split()[2:3] + line.split()[-1:] for line in table if line.startswith("l4")] == [["ddp", "24"]]
    derived = load_run(make_run("derived"), ["global_batch_size=null", "gradient_accumulation_steps=3"]).train
    assert largest_unchanged(derived.batch, 4, 5) == 3  # 3 divides 2 x 3, the sequences per rank and step


def test_predictions_need_no_gpu_and_no_tokens() -> None:
    large = ("--set", "model.n_layers=48", "--set", "model.emb_dim=1600", "--set", "model.n_heads=25")
    options = ("--predict", "a100-40gb,rtx3090-24gb", "--world-size", "8", *large)
    done = launch.run(ROOT / "find_batch_size.py", str(ROOT / "runs" / "8xa100"), *options)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["a100-40gb", "37.4", "ddp"] in [row[:3] for row in rows]
    assert "rtx3090-24gb, ddp: not even one sequence fits; predicted to fit: --set parallel=fsdp, or" in (done.stdout)
    assert "calibrated with torch's allocator, confirmed on one H200" in done.stdout


def test_small_models_are_shown_in_mib(make_run: MakeRun) -> None:
    run = load_run(make_run(), [])
    first, *_ = prediction_table(run.model, run.train, [known_gpus()["l4"]], 1)
    assert re.search(r": MiB on each of 1 ranks, with ddp at micro-batch 2: weights 0\.\d*[1-9]", first), first
