"""Record of a program's calls to emulated GPUs: kernels, matrix products, collectives, copies, waits, allocations.

    with record() as recording:
        train_step(...)
    recording.launches, recording.synchronizations, recording.collectives["AllReduce"].bytes

For programs under tests/fakegpu/run. Needs no torch.
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
    """Kind of an event, in the order of record.h."""

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
    """Event of record.h."""

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
    """One call; fields of other kinds are 0."""

    kind: Kind
    name: str  # of the kernel, the collective, the function, or the direction of a copy
    device: int
    stream: int
    object: int  # the CUDA event that is recorded or waited for; the address that is allocated or freed
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    flops: float  # of a GEMM
    bytes: int  # GEMM: read and written; collective: the larger of its buffers; copy, allocation: its size
    ranks: int  # of a collective's group


@attrs.frozen
class Traffic:
    """Calls and bytes of one kind of collective or copy."""

    calls: int
    bytes: int


@attrs.define
class Recording:
    """Events in the order of the calls, of all threads and devices of this process."""

    events: list[Event] = attrs.field(factory=list)

    def of(self, *kinds: Kind) -> list[Event]:
        """Return the events of some kinds."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def launches(self) -> int:
        """Kernels that the host launches, matrix products included, NCCL's excluded."""
        return len(self.of(*LAUNCHES))

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products."""
        return sum(event.flops for event in self.of(Kind.GEMM))

    @property
    def streams(self) -> Counter[int]:
        """Launches of each stream."""
        return Counter(event.stream for event in self.of(*LAUNCHES))

    @property
    def kernels(self) -> Counter[str]:
        """Launches by the kernel's name."""
        return Counter(event.name for event in self.of(*LAUNCHES))

    @property
    def synchronizations(self) -> Counter[str]:
        """Number of host waits, by the function that waited."""
        return Counter(event.name for event in self.of(Kind.SYNCHRONIZE))

    @property
    def collectives(self) -> dict[str, Traffic]:
        """Calls and bytes by the collective's name."""
        return self._traffic(Kind.COLLECTIVE)

    @property
    def copies(self) -> dict[str, Traffic]:
        """Calls and bytes by direction: HtoD, DtoH, DtoD, with " pageable" where the host's side is not pinned."""
        return self._traffic(Kind.COPY)

    def _traffic(self, kind: Kind) -> dict[str, Traffic]:
        found: dict[str, list[int]] = {}
        for event in self.of(kind):
            found.setdefault(event.name, []).append(event.bytes)
        return {name: Traffic(len(sizes), sum(sizes)) for name, sizes in found.items()}


@contextmanager
def record() -> Iterator[Recording]:
    """Record this process's calls within the block; the recording is filled at its end. Not to be nested."""
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
    """Return how many kernels this process has launched, recorded or not."""
    return int(_driver().fakegpu_launches())


def _driver() -> ctypes.CDLL:
    """Return the emulated driver. Raises BadInput where there is none, or a real one."""
    try:
        driver = ctypes.CDLL(LIBRARY)
        driver.fakegpu_stop.restype = ctypes.c_size_t
        driver.fakegpu_launches.restype = ctypes.c_long
    except (OSError, AttributeError):
        raise BadInput("no emulated GPU; put tests/fakegpu/run before the command") from None
    return driver


def _event(entry: Entry) -> Event:
    values: dict[str, Any] = {name: getattr(entry, name) for name, *_ in Entry._fields_}
    values |= {"kind": Kind(entry.kind), "name": entry.name.decode(), "grid": (*entry.grid,), "block": (*entry.block,)}
    return Event(**values)
