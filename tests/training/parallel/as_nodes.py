"""Run train.py as if each group of NODE_SIZE ranks were a node, although all ranks are on this machine.

To that end, the environment variables that torchrun sets are changed.
"""

import os

import train

if "RANK" in os.environ:
    rank, size = int(os.environ["RANK"]), int(os.environ["NODE_SIZE"])
    os.environ |= {
        "LOCAL_RANK": str(rank % size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": str(rank // size),
        "GROUP_WORLD_SIZE": str(int(os.environ["WORLD_SIZE"]) // size),
    }
train.leave(train.main())
