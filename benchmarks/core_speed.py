"""The speed of CORE compared with lm-evaluation-harness, in items per second for the same prompts.

    python benchmarks/core_speed.py --bundle eval_bundle --tokenizer gpt2 --items 16

The two programs take turns on one thread, and both score every choice after its few-shot examples. The harness does not
put a beginning-of-text id in front of a prompt.
"""

import statistics
import tempfile
import time
from pathlib import Path

import attrs
import bench  # imported first, because it makes the repository's modules importable
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from evaluation.core.bundle import CoreTask, read_bundle
from evaluation.core.core import measure
from evaluation.export.export import export
from evaluation.shared.load import Trained
from evaluation.shared.model_location import ModelLocation
from model.config import GPT2_SIZES
from model.gpt import GPT, initialize
from tokens.tokenizer.loading import load_tokenizer
from training.parallel.process_group import start, stop

ROUNDS = 3
BATCH_SIZE = 16  # number of requests that the harness scores in one batch


def main(*, bundle: Path, tokenizer: str, tasks: str | None = None, items: int = 16, layers: int = 4) -> None:
    """Print the items per second of each task, for a network with random weights and GPT-2's architecture.

    With 12 layers, the network has GPT-2's size.
    """
    loaded_tokenizer = load_tokenizer(tokenizer)
    config = attrs.evolve(GPT2_SIZES["124M"], n_layers=layers, emb_dim=64 * layers, n_heads=layers)
    network = GPT(attrs.evolve(config, vocab_size=loaded_tokenizer.vocabulary_size))
    initialize(network, 0)
    trained = Trained(network.eval(), loaded_tokenizer, ModelLocation(Path("random"), None, Path("random")))
    ranks = start("cpu", 3600)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        export(trained, Path(folder) / "model", None, None)
        harness = HFLM(pretrained=f"{folder}/model", batch_size=BATCH_SIZE, device="cpu")
    core_tasks, data = read_bundle(bundle, tasks, items)
    rows = []
    for task in core_tasks:
        requests = _requests(task)
        seconds: list[list[float]] = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            measure(trained, ([task], data), ranks)
            core_end = time.perf_counter()
            harness.loglikelihood(requests, disable_tqdm=True)
            seconds.append([core_end - began, time.perf_counter() - core_end])
        core_seconds, harness_seconds = (statistics.median(column) for column in zip(*seconds, strict=True))
        count = len(task.questions)
        speeds = [f"{count / core_seconds:.2f}", f"{count / harness_seconds:.2f}"]
        speeds.append(f"{harness_seconds / core_seconds:.2f}")
        rows.append([task.entry.label, str(count), str(len(requests)), *speeds])
    stop()
    print(bench.table(["task", "items", "choices", "items/s", "harness, items/s", "ratio"], rows))


def _requests(task: CoreTask) -> list[Instance]:
    """Return the prompts in the form of the harness's tasks: the space before a choice belongs to the choice."""
    parts = [prompt for number in range(len(task.questions)) for prompt in task.prompts(number)]
    split = [(context.rstrip(), context[len(context.rstrip()) :] + choice) for context, choice in parts]
    return [Instance("loglikelihood", doc={}, arguments=request, idx=0) for request in split]


if __name__ == "__main__":
    bench.run(main)
