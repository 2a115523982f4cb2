"""`evaluate.py serve` under load, with many clients or one client: lost answers, tokens/s, fairness and memory.

python benchmarks/serve_load.py [--clients 32] [--run runs/quickstart]

All clients use the loopback interface. Without --run, a network with the shape of the quickstart is trained for a few
steps. Each client is a thread that uses OpenAI's client to stream greedy continuations, one after another, for
--seconds.
"""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import bench  # imported first, because it makes the repository's modules importable
import openai

from common.json_files import read_json
from model.config import ModelConfig
from training.hardware.environment import git_commit

QUICKSTART = Path(__file__).parents[1] / "runs" / "quickstart" / "model.json"
PROMPT = [*b"def main(self):"]


class Client(threading.Thread):
    """A client that sends one request after another until the time `end`."""

    def __init__(self, url: str, model: str, tokens: int, end: float):
        super().__init__()
        self.api = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)
        self.model, self.tokens, self.end = model, tokens, end
        self.received = self.answers = 0
        self.rate = 0.0  # tokens/s, including the time that the client waits
        self.failures: list[str] = []

    def run(self) -> None:
        began = time.monotonic()
        while time.monotonic() < self.end:
            try:
                stream = self.api.completions.create(
                    model=self.model, prompt=PROMPT, max_tokens=self.tokens, temperature=0, stream=True, logprobs=0
                )
                finish = None
                for chunk in stream:
                    choice = chunk.choices[0]
                    finish = choice.finish_reason
                    if choice.logprobs is not None:
                        self.received += len(choice.logprobs.tokens or [])
                if finish is None:
                    raise ValueError("the stream ended without a finish reason")
                self.answers += 1
            except Exception as error:  # noqa: BLE001  # every failure is counted
                self.failures.append(repr(error))
        self.rate = self.received / (time.monotonic() - began)


def main(*, clients: int = 32, seconds: float = 30.0, tokens: int = 32, run: Path | None = None) -> None:
    """Print the table."""
    print(f"torch threads 1, commit {git_commit()}", flush=True)
    with TemporaryDirectory() as folder:
        run_directory = run or bench.prepare(
            Path(folder), ModelConfig(**read_json(QUICKSTART)), 4, global_batch_size=8, microbatch_size=8
        )
        if run is None:
            command = [sys.executable, "train.py", str(run_directory), "--device", "cpu"]
            subprocess.run(command, check=True, capture_output=True)
        command = [sys.executable, "evaluate.py", "serve", str(run_directory), "--device", "cpu", "--port", "0"]
        command += [] if run else ["--tokenizer", "bytes"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = re.search(r"http://\S+", server.stdout.readline())
            assert url is not None
            measure(f"{url[0]}/v1", server.pid, [1, clients, clients, clients], seconds, tokens)
        finally:
            server.terminate()
            print(f"exit status of the server after SIGTERM: {server.wait(30)}")


def measure(url: str, pid: int, crowds: list[int], seconds: float, tokens: int) -> None:
    """Print a row for each crowd of clients. Rates are relative to the first crowd, which is a single client."""
    model = openai.OpenAI(base_url=url, api_key="none").models.list().data[0].id
    rows, single_rate = [], 0.0
    for count in crowds:
        before, end = memory_mib(pid), time.monotonic() + seconds
        crowd = [Client(url, model, tokens, end) for _ in range(count)]
        for client in crowd:
            client.start()
        for client in crowd:
            client.join()
        rates = sorted(client.rate for client in crowd)
        single_rate = single_rate or rates[0]
        failures = [problem for client in crowd for problem in client.failures]
        row = [f"{count}", f"{sum(client.answers for client in crowd):,}", f"{len(failures)}", f"{sum(rates):,.0f}"]
        row += [f"{sum(rates) / single_rate:.2f}", f"{rates[0]:.1f} to {rates[-1]:.1f}", f"{before:.0f}"]
        rows.append([*row, f"{memory_mib(pid):.0f}"])
        print(*failures[:3], sep="\n", end="")
    columns = ["clients", "answers", "lost", "tokens/s", "x one client", "per client", "MiB before", "MiB after"]
    print(bench.table(columns, rows))


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    kilobytes = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert kilobytes is not None
    return int(kilobytes[1]) / 1024


if __name__ == "__main__":
    bench.run(main)
