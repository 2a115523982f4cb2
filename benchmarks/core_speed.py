"""CORE beside lm-evaluation-harness: items per second of the same prompts, one thread, rounds alternate.

    python benchmarks/core_speed.py --bundle eval_bundle --tokenizer gpt2 --items 16

Both score every choice behind its examples; the harness reads no id that begins a text.
"""

import statistics
import tempfile
import time
from pathlib import Path

import attrs
import bench  # first: it makes the repository's modules importable
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
BATCH_SIZE = 16  # requests of the harness at a time


def main(*, bundle: Path, tokenizer: str, tasks: str | None = None, items: int = 16, layers: int = 4) -> None:
    """Print items per second of each task, for a network of random weights in GPT-2's form: of 12 layers, its size."""
    known = load_tokenizer(tokenizer)
    config = attrs.evolve(GPT2_SIZES["124M"], n_layers=layers, emb_dim=64 * layers, n_heads=layers)
    network = GPT(attrs.evolve(config, vocab_size=known.vocabulary_size))
    initialize(network, 0)
    trained = Trained(network.eval(), known, ModelLocation(Path("random"), None, Path("random")))
    ranks = start("cpu", 3600)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        export(trained, Path(folder) / "model", None, None)
        theirs = HFLM(pretrained=f"{folder}/model", batch_size=BATCH_SIZE, device="cpu")
    chosen, data = read_bundle(bundle, tasks, items)
    rows = []
    for task in chosen:
        requests = _requests(task)
        seconds: list[list[float]] = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            measure(trained, ([task], data), ranks)
            between = time.perf_counter()
            theirs.loglikelihood(requests, disable_tqdm=True)
            seconds.append([between - begun, time.perf_counter() - between])
        ours, other = (statistics.median(column) for column in zip(*seconds, strict=True))
        count = len(task.questions)
        speeds = [f"{count / ours:.2f}", f"{count / other:.2f}", f"{other / ours:.2f}"]
        rows.append([task.entry.label, str(count), str(len(requests)), *speeds])
    stop()
    print(bench.table(["task", "items", "choices", "items/s", "harness, items/s", "ratio"], rows))


def _requests(task: CoreTask) -> list[Instance]:
    """Return the prompts as the harness's tasks give them: white space begins the continuation."""
    parts = [prompt for number in range(len(task.questions)) for prompt in task.prompts(number)]
    split = [(before.rstrip(), before[len(before.rstrip()) :] + then) for before, then in parts]
    return [Instance("loglikelihood", doc={}, arguments=each, idx=0) for each in split]


if __name__ == "__main__":
    bench.run(main)
