"""`--dry-run` shows the tensor shards of a run."""

import re

from tests.conftest import TINY_MODEL, MakeRun, complete


def test_dry_run_shows_the_shards_of_a_rank(make_run: MakeRun) -> None:
    run = make_run(parallel="fsdp", tensor_parallel=2, require_stock_class=False)
    heads = ("--set", "model.n_heads=4", "--set", "model.n_kv_heads=2")
    lines = complete(run, "--dry-run", "--world-size", "4", *heads).stdout
    assert "shards       2, 1 on each rank, fsdp on 2\n" in lines
    cells = {row[0]: row[1:] for row in (re.split(" {2,}", line) for line in lines.splitlines())}
    layers, width = TINY_MODEL["n_layers"], TINY_MODEL["emb_dim"]
    qkv = ["heads kv_heads kv_heads x embed", "heads 2, kv_heads 2", f"{layers * 4 * 2 * width * width // 4:,}"]
    assert cells["blocks.*.attention.qkv.weight"] == qkv
    assert cells["final_norm.weight"] == ["embed", "whole", f"{4 * width // 2}"]
    assert "micro-batch 2 x accumulation 4 x world size 2 / tensor_parallel 2" in complete(run, "--dry-run").stdout
    assert "shards " not in complete(run, "--dry-run", "--set", "tensor_parallel=1").stdout
