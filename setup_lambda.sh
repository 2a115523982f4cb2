#!/usr/bin/env bash
# Set up a new Ubuntu GPU machine (Lambda, RunPod, ...): create a virtual environment, install the requirements, and
# print the machine's hardware and credentials. Running it again does no harm.
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
print_fact() { printf '%-14s %s\n' "$1" "$2"; }
fail() { echo "setup_lambda.sh: $1" >&2; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# Triton, torch.compile's compiler on a GPU, compiles C code that includes Python.h.
can_compile() {
  local headers
  headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')
  printf '#include <stdlib.h>\n#include <Python.h>\n' | "${CC:-gcc}" -fsyntax-only "-I$headers" -xc - 2>/dev/null
}

# If the user has chosen an interpreter, it must already run: installing system packages would not repair it.
venv_package=python3-venv
if [ -n "${PYTHON:-}" ]; then
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2], int(sys.version_info >= (3, 10)))' 2>/dev/null) ||
    fail "PYTHON=$python: does not run; pass the path of Python 3.10 or newer, or omit PYTHON to use python3"
  [ "${version#* }" = 1 ] ||
    fail "PYTHON=$python: got Python ${version% *}, expected 3.10 or newer; pass another, or omit PYTHON to use python3"
  venv_package="python${version% *}-venv"
fi

packages=()
command -v make >/dev/null || packages+=(make)
"$python" -c 'import ensurepip, venv' 2>/dev/null || packages+=("$venv_package")
if command -v nvidia-smi >/dev/null && ! can_compile; then packages+=(build-essential python3-dev); fi
if [ ${#packages[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || fail "there is no apt-get; install ${packages[*]}"
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${packages[@]}" >/dev/null
fi

make --no-print-directory python-version PYTHON="$python"
.venv/bin/python -c 'import torch' 2>/dev/null || line=$("$python" -m training.hardware.driver 2>&1) || fail "$line"
make --no-print-directory install PYTHON="$python"

echo
.venv/bin/python -m training.hardware.preflight || fail "this machine cannot train yet: see the problem above"
print_fact memory "$(free -h | awk '/^Mem:/ {print $2}')"
saved_token=${HF_HOME:-$HOME/.cache/huggingface}/token
for name in HF_TOKEN OPENAI_API_KEY; do
  if [ -n "${!name:-}" ]; then print_fact "$name" set
  elif [ "$name" = HF_TOKEN ] && [ -s "$saved_token" ]; then print_fact "$name" "saved by hf auth login"
  else print_fact "$name" "not set"; fi
done
cat <<'COMMANDS'
ready. In every new shell, first run:
  source .venv/bin/activate
then, for example:
  python train.py runs/8xa100 --plan
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300
  torchrun --standalone --nproc_per_node=gpu train.py runs/8xa100
COMMANDS
