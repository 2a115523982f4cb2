#!/usr/bin/env bash
# One node of a job, started once: launch/node.sh runs/8xa100 [options of train.py]. The other files of this folder run
# it on every node, again and again. torchrun reads PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT.
# Exit status: 0 done; 78 for good, by an error that no restart mends, or a divergence; 75 to start again.
set -uo pipefail
trap '' PIPE # whoever reads the output may go
refuse() { echo "node.sh: $1" >&2; exit 78; }
cd "$(dirname -- "$0")/.." || exit 78
for word in "$@"; do
  case $word in --resume | --resume=*) refuse "each start would obey --resume: run train.py once before" ;; esac
done
# shellcheck disable=SC1091  # made by setup_lambda.sh
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
command -v torchrun > /dev/null || refuse "there is no torchrun: make install, or activate its environment"
export PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-gpu}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300} # seconds to save in, after SIGTERM
# Of each rank of this node; one that was killed leaves none. torchrun's own status is 1, whatever the ranks' are.
LOCKSTEP_EXIT_RECORDS=$(mktemp -d) || exit 78
export LOCKSTEP_EXIT_RECORDS

torchrun train.py "$@" &
trap 'kill -TERM "$!"' TERM
trap 'rm -rf "$LOCKSTEP_EXIT_RECORDS"' EXIT
while wait "$!"; status=$?; kill -0 "$!" 2> /dev/null; do :; done # a trap ends a wait
[ "$status" = 0 ] && exit
grep -Eqs '"outcome": "(error|diverged)"' "$LOCKSTEP_EXIT_RECORDS"/* && exit 78
if [ -z "$(ls "$LOCKSTEP_EXIT_RECORDS")" ]; then # no rank has ended by itself: can torchrun start any?
  parse='from torch.distributed.run import config_from_args, parse_args; config_from_args(parse_args(["train.py"]))'
  problem=$(python -c "$parse" 2>&1)
  [ $? = 1 ] && refuse "torchrun cannot start here: ${problem##*$'\n'}"
fi
exit 75
