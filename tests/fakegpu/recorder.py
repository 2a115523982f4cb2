"""Records a program's calls to emulated GPUs: kernels, matrix products, collectives, copies, waits and allocations.

    with record() as recording:
        train_step(...)
    recording.launches, recording.synchronizations, recording.collectives["AllReduce"].bytes

This module is for programs that are started with tests/fakegpu/run. The module does not need torch.
"""

import ctypes
import enum
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from common.errors import BadInput

LIBRARY = "libcuda.so.1"


class Kind(enum.Enum):
    """The kind of an event, in the order of record.h."""

    KERNEL = 0
    MODULE = 1  # kernel of a module loaded at run time: Triton, NVRTC
    GEMM = 2
    COLLECTIVE = 3
    COPY = 4
    FILL = 5
    SYNCHRONIZE = 6  # the host waits for the device
    ALLOCATE = 7
    FREE = 8
    REFUSED = 9  # an allocation beyond the GPU's memory
    PINNED = 10  # an allocation of page-locked host memory
    SIGNAL = 11  # a CUDA event recorded on a stream
    WAIT = 12  # a stream waits for a CUDA event
    COMMUNICATOR = 13


LAUNCHES = (Kind.KERNEL, Kind.MODULE, Kind.GEMM)


class Entry(ctypes.Structure):
    """The struct Event of record.h."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("device", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("stream", ctypes.c_uint64),
        ("object", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("flops", ctypes.c_double),
        ("bytes", ctypes.c_uint64),
        ("ranks", ctypes.c_int),
    )


@attrs.frozen(kw_only=True)
class Event:
    """One call. Fields that do not apply to its kind are 0."""

    kind: Kind
    name: str  # name of the kernel, collective or function; for a copy, its direction
    device: int
    stream: int
    object: int  # the CUDA event that is recorded or waited for, or the address that is allocated or freed
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    flops: float  # of a GEMM
    bytes: int  # GEMM: bytes read and written; collective: size of the larger buffer; copy or allocation: its size
    ranks: int  # number of ranks in a collective's group


@attrs.frozen
class Traffic:
    """The number of calls, and their bytes, for one kind of collective or copy."""

    calls: int
    bytes: int


@attrs.define
class Recording:
    """The events of all threads and devices of this process, in the order of the calls."""

    events: list[Event] = attrs.field(factory=list)

    def of(self, *kinds: Kind) -> list[Event]:
        """Return the events of the given kinds."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def launches(self) -> int:
        """The number of kernels that the host launches, including matrix products but not NCCL's kernels."""
        return len(self.of(*LAUNCHES))

    @property
    def flops(self) -> float:
        """The floating-point operations of the matrix products."""
        return sum(event.flops for event in self.of(Kind.GEMM))

    @property
    def streams(self) -> Counter[int]:
        """The number of launches on each stream."""
        return Counter(event.stream for event in self.of(*LAUNCHES))

    @property
    def kernels(self) -> Counter[str]:
        """The number of launches by the name of the kernel."""
        return Counter(event.name for event in self.of(*LAUNCHES))

    @property
    def synchronizations(self) -> Counter[str]:
        """The number of times that the host waits, by the function that waits."""
        return Counter(event.name for event in self.of(Kind.SYNCHRONIZE))

    @property
    def collectives(self) -> dict[str, Traffic]:
        """Calls and bytes by the name of the collective."""
        return self._traffic(Kind.COLLECTIVE)

    @property
    def copies(self) -> dict[str, Traffic]:
        """Calls and bytes by direction: HtoD, DtoH or DtoD, with " pageable" if the host's memory is not pinned."""
        return self._traffic(Kind.COPY)

    def _traffic(self, kind: Kind) -> dict[str, Traffic]:
        sizes_by_name: dict[str, list[int]] = {}
        for event in self.of(kind):
            sizes_by_name.setdefault(event.name, []).append(event.bytes)
        return {name: Traffic(len(sizes), sum(sizes)) for name, sizes in sizes_by_name.items()}


@contextmanager
def record() -> Iterator[Recording]:
    """Record this process's calls within the block. The recording is filled at the block's end. Do not nest blocks."""
    driver = _driver()
    recording = Recording()
    driver.fakegpu_start()
    try:
        yield recording
    finally:
        entries = ctypes.POINTER(Entry)()
        count = driver.fakegpu_stop(ctypes.byref(entries))
        recording.events.extend(_event(entries[index]) for index in range(count))


def launches() -> int:
    """Return the number of kernels that this process has launched, including kernels that were not recorded."""
    return int(_driver().fakegpu_launches())


def _driver() -> ctypes.CDLL:
    """Return the emulated driver. Raise BadInput if there is no driver, or if the driver is real."""
    try:
        driver = ctypes.CDLL(LIBRARY)
        driver.fakegpu_stop.restype = ctypes.c_size_t
        driver.fakegpu_launches.restype = ctypes.c_long
    except (OSError, AttributeError):
        raise BadInput("there is no emulated GPU; put tests/fakegpu/run before the command") from None
    return driver


def _event(entry: Entry) -> Event:
    values: dict[str, Any] = {name: getattr(entry, name) for name, *_ in Entry._fields_}
    values |= {"kind": Kind(entry.kind), "name": entry.name.decode(), "grid": (*entry.grid,), "block": (*entry.block,)}
    return Event(**values)
