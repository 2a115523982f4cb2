"""Environment of a run: versions, device, commit, and what is unknown on a CPU."""

import platform
from importlib import metadata

import pytest
import torch

from training.hardware.environment import cpu_name, environment, git_commit, peak_flops, peak_memory_bytes

CPU = torch.device("cpu")


def test_the_record_names_versions_and_the_processor() -> None:
    found = environment(CPU, 2)
    assert found["packages"]["torch"] == metadata.version("torch")
    assert (found["python"], found["device"], found["cuda"]) == (platform.python_version(), cpu_name(), None)
    assert (found["world_size"], found["threads"]) == (2, torch.get_num_threads())


def test_a_cpu_has_no_known_peak_but_a_peak_of_memory() -> None:
    assert peak_flops(CPU) is None
    assert 1 << 20 < peak_memory_bytes(CPU) < 1 << 45


def test_there_is_no_commit_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    git_commit.cache_clear()
    assert git_commit() is None
    git_commit.cache_clear()
