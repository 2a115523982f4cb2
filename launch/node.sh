#!/usr/bin/env bash
# One node of a job, started once: launch/node.sh runs/8xa100 [options of train.py]. The other files of this folder run
# it on every node, again and again. torchrun reads PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT.
# Exit status: 0 done; 78 for good, by an error or a divergence, which only the first node can tell; 75 to start again.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 78
case " $*" in *" --resume"*) echo "node.sh: each start would obey --resume: run train.py once before" >&2; exit 78 ;; esac
# shellcheck disable=SC1091  # made by setup_lambda.sh
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
export PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-gpu}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300} # seconds to save in, after SIGTERM

record=$1/exit.json # of the job, on the first node's disk; a kill leaves none
[ "${PET_NODE_RANK:-0}" = 0 ] && rm -f "$record"
torchrun train.py "$@" &
trap 'kill -TERM "$!"' TERM
while wait "$!"; status=$?; kill -0 "$!" 2> /dev/null; do :; done # a trap ends a wait
[ "$status" = 0 ] && exit
[ "${PET_NODE_RANK:-0}" = 0 ] && grep -Eqs '"outcome": "(error|diverged)"' "$record" && exit 78
exit 75
