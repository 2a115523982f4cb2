#!/usr/bin/env bash
# Set up a blank Ubuntu GPU machine (Lambda, RunPod, ...): virtual environment, requirements, and a report of its
# hardware and credentials. Idempotent.
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
say() { printf '%-14s %s\n' "$1" "$2"; }
fail() { echo "setup_lambda.sh: $1" >&2; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# Triton, torch.compile's compiler on a GPU, compiles C code that includes Python.h.
can_compile() {
  local headers
  headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')
  printf '#include <stdlib.h>\n#include <Python.h>\n' | "${CC:-gcc}" -fsyntax-only "-I$headers" -xc - 2>/dev/null
}

packages=()
command -v make >/dev/null || packages+=(make)
"$python" -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
if command -v nvidia-smi >/dev/null && ! can_compile; then packages+=(build-essential python3-dev); fi
if [ ${#packages[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || fail "there is no apt-get to install ${packages[*]}; install them"
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${packages[@]}" >/dev/null
fi

make --no-print-directory install PYTHON="$python"

echo
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
  say driver "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)"
  nvidia-smi --query-gpu=index,name,memory.total --format=csv,noheader | while IFS= read -r gpu; do say GPU "$gpu"; done
else
  say GPU "none (nvidia-smi does not answer)"
fi
say "free disk" "$(df -h --output=avail . | tail -n 1 | tr -d ' ') here; the FineWeb token set takes 21G"
say memory "$(free -h | awk '/^Mem:/ {print $2}')"
.venv/bin/python - <<'PYTHON'
import sys

import torch

from common.errors import BadInput
from training.hardware.preflight import check_compiler, choose_device

try:
    gpus = torch.cuda.device_count() if choose_device(None) == "cuda" else 0
    for index in range(gpus):
        torch.ones(8, device=f"cuda:{index}").sum().item()
    if gpus:
        check_compiler()
except (BadInput, RuntimeError) as error:
    sys.exit("setup_lambda.sh: " + str(error).partition("\n")[0])
print(f"{'torch':14} {torch.__version__} ({torch.version.cuda or 'no CUDA'}), {gpus} GPUs usable")
PYTHON
saved_token=${HF_HOME:-$HOME/.cache/huggingface}/token
for name in HF_TOKEN OPENAI_API_KEY; do
  if [ -n "${!name:-}" ]; then say "$name" set
  elif [ "$name" = HF_TOKEN ] && [ -s "$saved_token" ]; then say "$name" "saved by hf auth login"
  else say "$name" "not set"; fi
done
cat <<'COMMANDS'
ready. In every new shell, first:
  source .venv/bin/activate
then, for example:
  python train.py runs/8xa100 --plan
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300
  torchrun --standalone --nproc_per_node=gpu train.py runs/8xa100
COMMANDS
