# An image with Lockstep and everything that it needs. Build it in the root of a clone:
#
#   docker build --tag lockstep .
#       for NVIDIA GPUs: pip's default build of torch on Linux, which contains CUDA; start it with --gpus all --ipc host
#   docker build --tag lockstep-cpu --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .
#       for CPUs: the much smaller CPU build of torch
#
#   docker run --rm -it --gpus all --ipc host --volume "$PWD/runs:/lockstep/runs" lockstep make train
FROM python:3.12-slim
# The compiler is for torch.compile, and git records the commit of a run. slim images contain neither.
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential git && rm -rf /var/lib/apt/lists/*
WORKDIR /lockstep
# Only these two files come first, so that a change in the code does not install everything again.
COPY Makefile requirements.txt ./
ARG PIP_EXTRA_INDEX_URL=
RUN make python-version
RUN make install
COPY . .
ENV PATH=/lockstep/.venv/bin:$PATH
CMD ["python", "train.py", "--help"]
