"""The model card tells what the run recorded."""

import json
import math
from pathlib import Path

from tests.conftest import TINY_MODEL, MakeRun, complete
from tests.evaluation.comparison.stored import said


def test_the_card_tells_what_the_run_was(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    complete(run, "--price-per-hour", "3.29")
    said("export", run, tmp_path / "named", "--license", "mit")
    card = (tmp_path / "named" / "README.md").read_text()
    state = json.loads((run / "checkpoints" / "best" / "state.json").read_text())
    batch, length = state["config"]["global_batch_size"], TINY_MODEL["context_length"]
    loss = state["validation_loss"]
    for line in (
        "license: mit",
        "# named",
        f"| tokens | {state['tokens']:,} |",
        f"| global batch | {batch} sequences of {length} tokens, {batch * length:,} tokens |",
        f"| validation loss | {loss:.4f} nats per token (perplexity {math.exp(loss):,.2f}) |",
        f"| seed | {state['config']['train']['random_seed']} |",
        "at $3.29 an hour |",
        "| machine | 1 x ",
    ):
        assert line in card
    assert str(tmp_path) not in card
    assert "| dataset | `bytes` |" in card
    assert "| learning rate | 2 steps of warm-up to 0.01, cosine decay to 0.001 at step 8 |" in card
    assert "None" not in card
