"""The NVIDIA driver is queried through its libraries, and checked against torch's CUDA before torch is installed."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training.hardware import driver
from training.hardware.driver import driver_cuda, driver_gpus, main


def cuda(monkeypatch: pytest.MonkeyPatch, version: int, status: int = 0) -> None:
    """Emulate a driver that supports this CUDA version; 12080, for example, means 12.8."""

    def get_version(number: Any) -> int:
        number._obj.value = version
        return status

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=get_version))


def test_driver_library_counts_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def library(status: int) -> Any:
        def count(number: Any) -> int:
            number._obj.value = 3
            return 0

        return SimpleNamespace(nvmlInit_v2=lambda: status, nvmlDeviceGetCount_v2=count)

    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(driver, "DRIVER_GPUS", tmp_path)
    for status, gpus in ((0, 3), (18, 1)):  # 18: the versions of the library and the kernel module differ
        monkeypatch.setattr(ctypes, "CDLL", lambda name, status=status: library(status))
        assert driver_gpus() == gpus
    monkeypatch.undo()
    monkeypatch.setattr(driver, "NVML", "libabsent.so")
    assert driver_gpus() == 0


def test_driver_library_returns_cuda_version(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, 12080)
    assert driver_cuda() == "12.8"
    cuda(monkeypatch, 0, status=34)
    assert driver_cuda() is None
    monkeypatch.undo()
    monkeypatch.setattr(driver, "CUDA", "libabsent.so")
    assert driver_cuda() is None


@pytest.mark.parametrize(("version", "status"), [(12080, 1), (13000, 0), (13020, 0)])
def test_only_an_older_major_version_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: int, status: int
) -> None:
    cuda(monkeypatch, version)
    assert main() == status
    message = capsys.readouterr().err
    assert message.startswith("the NVIDIA driver is too old: it supports CUDA 12.8, but the torch ") == (status == 1)
    assert len(message.splitlines()) == status
