"""train.py with each NODE_SIZE ranks as a node, by the variables by which torchrun tells; all are on this machine."""

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
