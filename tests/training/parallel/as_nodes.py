"""Run train.py as if every NODE_SIZE ranks were a node, although all of them are on this machine.

torchrun's variables are changed for this.
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
