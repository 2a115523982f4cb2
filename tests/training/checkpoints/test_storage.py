"""Checkpoint storage: an object store, without renames or writes in place, can implement the interface."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from training.checkpoints import atomic_commit
from training.checkpoints.directory import find
from training.checkpoints.disk import checkpoints_of
from training.checkpoints.run_record import RunRecord
from training.checkpoints.saved_state import SavedState, read_state
from training.checkpoints.storage import (
    MANIFEST,
    OPTIMIZER,
    WEIGHTS,
    FileDigest,
    NewFile,
    Storage,
    WrittenBytes,
    name_of,
)
from training.precision import SavedLossScale
from training.state import Position

FILES = {WEIGHTS: NewFile(b"header", 8), OPTIMIZER: NewFile(b"header", 8)}


class Bucket:
    """Objects by key; hidden files are staged in memory, and published with the manifest last."""

    def __init__(self, downloads: Path):
        self.objects: dict[str, bytes] = {}
        self._staged: dict[str, bytearray] = {}
        self._downloads = downloads

    def names(self) -> list[str]:
        return sorted({key.partition("/")[0] for key in self.objects})

    def exists(self, name: str = "") -> bool:
        target = self.target(name) or name
        return any(key.startswith(target) for key in self.objects)

    def target(self, name: str) -> str | None:
        link = self.objects.get(name)
        return None if link is None else link.decode()

    def local_file(self, name: str, file: str) -> Path:
        path = self._downloads / name / file
        path.parent.mkdir(exist_ok=True)
        key = f"{self.target(name) or name}/{file}"
        if key in self.objects:
            path.write_bytes(self.objects[key])
        return path

    def where(self, name: str) -> str:
        return f"s3://bucket/{name}"

    def begin(self, name: str, files: Mapping[str, NewFile]) -> None:
        self._staged = {file: bytearray(new.header.ljust(new.size_bytes, b"\0")) for file, new in files.items()}

    def write_rows(self, name: str, file: str, rows: Iterable[tuple[int, memoryview]]) -> None:
        for offset_bytes, content in rows:
            self._staged[file][offset_bytes : offset_bytes + len(content)] = content

    def put(self, name: str, file: str, content: bytes) -> None:
        self._staged[file] = bytearray(content)

    def entry(self, name: str, file: str, pieces: Sequence[WrittenBytes] | None = None) -> FileDigest:
        return FileDigest(len(self._staged[file]), hashlib.sha256(self._staged[file]).hexdigest())

    def publish(self, name: str) -> None:
        for file in sorted(self._staged, key=lambda file: file == MANIFEST):
            self.objects[f"{name}/{file}"] = bytes(self._staged[file])

    def discard(self, name: str) -> None:
        self._staged = {}

    def point(self, link: str, name: str | None) -> None:
        self.objects.pop(link, None)
        if name is not None:
            self.objects[link] = name.encode()

    def remove(self, names: Sequence[str]) -> None:
        self.objects = {key: value for key, value in self.objects.items() if key.partition("/")[0] not in names}

    def recover(self) -> None:
        pass

    def copy(self, source: str, name: str) -> None:
        raise NotImplementedError

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError

    def set_aside(self, archive: Path, names: Sequence[str] | None = None) -> Path:
        raise NotImplementedError


def save(storage: Storage, step: int, best_step: int | None = None) -> None:
    """Save a state as the asynchronous writer does, with two ranks that write a byte each."""
    name = name_of(step)
    storage.begin(name, FILES)
    content = bytes([step])
    written = {file: [WrittenBytes.of(0, new.header)] for file, new in FILES.items()}
    for rank in range(2):
        for file, new in FILES.items():
            offset = len(new.header) + rank
            storage.write_rows(name, file, [(offset, memoryview(content))])
            written[file].append(WrittenBytes.of(offset, content))
    config = RunRecord(model={}, train={}, global_batch_size=8, numerics={"determinism": "run"})
    state = SavedState(
        position=Position(step=step, best_step=best_step),
        optimizer_steps=step,
        loss_scale=SavedLossScale(scale=1.0, finite_steps=0),
        config=config,
    )
    atomic_commit.seal(storage, name, state, written)
    storage.publish(name)
    atomic_commit.tidy(storage, name, best_step, keep=1)


@pytest.fixture(params=["disk", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return checkpoints_of(tmp_path) if request.param == "disk" else Bucket(tmp_path)


def test_saves_are_found_verified_and_retained_alike_in_any_storage(storage: Storage) -> None:
    assert find(storage, "auto") is None
    for step in (1, 2, 3):
        save(storage, step, best_step=1)
    assert storage.names() == ["best", "latest", "step-00000001", "step-00000003"]
    assert (storage.target("latest"), storage.target("best")) == ("step-00000003", "step-00000001")
    found = find(storage, "auto")
    assert found is not None and str(found) == storage.where("step-00000003")
    assert read_state(found).position == Position(step=3, best_step=1)
    assert found.file(WEIGHTS).read_bytes() == b"header\3\3"


def test_a_checkpoint_has_the_same_bytes_in_any_storage(tmp_path: Path) -> None:
    disk, bucket = checkpoints_of(tmp_path), Bucket(tmp_path)
    save(disk, 5)
    save(bucket, 5)
    files = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints" / "step-00000005").iterdir()}
    bucket.point("latest", None)
    assert {f"step-00000005/{name}": content for name, content in files.items()} == bucket.objects


def test_a_save_that_was_not_published_is_absent(storage: Storage) -> None:
    save(storage, 1)
    storage.begin(name_of(2), FILES)
    assert storage.names() == ["latest", "step-00000001"]
    storage.discard(name_of(2))
    found = find(storage, "auto")
    assert found is not None and found.name == "step-00000001"
