#!/usr/bin/env bash
# Takes a blank Ubuntu GPU box (Lambda, RunPod, ...) to ready: virtual environment, requirements, and a look at what is
# there. Safe to run again at any time; what is done already is left alone.
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
say() { printf '%-14s %s\n' "$1" "$2"; }
fail() { echo "setup_lambda.sh: $1" >&2; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

if ! command -v make >/dev/null || ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  command -v apt-get >/dev/null || fail "make or Python's venv is missing and there is no apt-get; install both"
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq make python3-venv >/dev/null
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
import torch

cuda = torch.version.cuda or "no CUDA"
print(f"{'torch':14} {torch.__version__} ({cuda}), {torch.cuda.device_count()} GPUs usable")
for index in range(torch.cuda.device_count()):
    torch.ones(8, device=f"cuda:{index}").sum().item()
PYTHON
saved_token=${HF_HOME:-$HOME/.cache/huggingface}/token
for name in HF_TOKEN OPENAI_API_KEY; do
  if [ -n "${!name:-}" ]; then say "$name" set
  elif [ "$name" = HF_TOKEN ] && [ -s "$saved_token" ]; then say "$name" "saved by hf auth login"
  else say "$name" "not set"; fi
done
echo "ready: TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300 .venv/bin/torchrun --standalone --nproc_per_node=gpu train.py runs/8xa100"
