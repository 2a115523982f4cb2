"""NVIDIA driver: asked by its own libraries, and compared with torch's CUDA before torch is there."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training.hardware import driver
from training.hardware.driver import driver_cuda, driver_gpus, main


def cuda(monkeypatch: pytest.MonkeyPatch, found: int, status: int = 0) -> None:
    """Install a driver that supports the CUDA version, such as 12080."""

    def version(number: Any) -> int:
        number._obj.value = found
        return status

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=version))


def test_the_driver_is_asked_by_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def library(status: int) -> Any:
        def count(number: Any) -> int:
            number._obj.value = 3
            return 0

        return SimpleNamespace(nvmlInit_v2=lambda: status, nvmlDeviceGetCount_v2=count)

    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(driver, "DRIVER_GPUS", tmp_path)
    for status, gpus in ((0, 3), (18, 1)):  # 18: the library's version is not the kernel module's
        monkeypatch.setattr(ctypes, "CDLL", lambda name, status=status: library(status))
        assert driver_gpus() == gpus
    monkeypatch.undo()
    monkeypatch.setattr(driver, "NVML", "libabsent.so")
    assert driver_gpus() == 0


def test_the_cuda_version_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
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
    told = capsys.readouterr().err
    assert told.startswith("the NVIDIA driver is too old: it supports CUDA 12.8, the torch ") == (status == 1)
    assert len(told.splitlines()) == status
