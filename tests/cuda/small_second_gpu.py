"""Script around an entry script: on rank 1 the emulated GPU has SECOND_GPU_GIB of memory."""

import os
import runpy
import sys

if os.environ.get("LOCAL_RANK") == "1":
    os.environ["FAKEGPU_GIB"] = os.environ["SECOND_GPU_GIB"]  # read at the first call of CUDA
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
