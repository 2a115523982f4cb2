"""A version of train.py for nodes that share a network disk, which they access as the NFS client of Linux does.

Environment variables:

NODE_SIZE   number of ranks on a node
CLIENTS     folder for the caches of the disk's clients, one per node
LATER_NODE  the node whose client flushes last
WRONG_BYTE  if set, the disk returns a wrong last byte for each file

A client that changes part of a page reads the whole page first, and later flushes the whole page. Here, every client
reads the file as `create_partial` left it, as if no other node had flushed its pages yet. That is the worst order,
whichever node flushes last.
"""

import fcntl
import os
import runpy
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from common.files import partial_of
from training.checkpoints import tensor_files, writer
from training.checkpoints.atomic_commit import create_partial

PAGE_BYTES = 4096
NODE = int(os.environ["RANK"]) // int(os.environ["NODE_SIZE"])
CLIENTS = Path(os.environ["CLIENTS"])


def create_and_keep(path: Path, sizes: Mapping[str, int]) -> None:
    create_partial(path, sizes)
    shutil.rmtree(CLIENTS / path.name, ignore_errors=True)
    shutil.copytree(partial_of(path), CLIENTS / path.name / "server")


def write_through_client(path: Path, file: str, rows: Iterable[tuple[int, memoryview]]) -> None:
    """Write into this node's cache, which its ranks share, and then flush the changed pages."""
    server, cache = partial_of(path) / file, CLIENTS / path.name / f"{file}-{NODE}"
    with suppress(FileExistsError):
        os.close(os.open(cache, os.O_CREAT | os.O_EXCL))
    pages: set[int] = set()
    with cache.open("r+b") as cached:
        fcntl.flock(cached, fcntl.LOCK_EX)  # the ranks of a node take turns, because they share a client
        if not os.fstat(cached.fileno()).st_size:
            cached.write((CLIENTS / path.name / "server" / file).read_bytes())
        for offset_bytes, content in rows:
            cached.seek(offset_bytes)
            cached.write(content)
            pages |= set(range(offset_bytes // PAGE_BYTES, -(-(offset_bytes + len(content)) // PAGE_BYTES)))
        cached.flush()
        time.sleep(0.2 if str(NODE) == os.environ["LATER_NODE"] else 0)
        with server.open("r+b") as flushed:
            for page in sorted(pages):
                for opened in (cached, flushed):
                    opened.seek(page * PAGE_BYTES)
                flushed.write(cached.read(PAGE_BYTES))
            if "WRONG_BYTE" in os.environ:
                flushed.seek(-1, os.SEEK_END)
                flushed.write(b"\x55")


writer.create_partial, tensor_files.write_rows = create_and_keep, write_through_client
runpy.run_path(str(Path(__file__).parents[1] / "parallel" / "as_nodes.py"))
