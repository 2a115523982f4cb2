#!/usr/bin/env bash
# Run one node of a job once: launch/node.sh runs/8xa100 [options of train.py]. The other files of this folder run it on
# every node, repeatedly. torchrun reads PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT.
# Exit status: 0 done; 75 start this node again; 78 do not start it again: the run has diverged, or an error cannot be
# fixed by a restart.
set -uo pipefail
trap '' PIPE # continue even if nobody reads the output any longer
refuse() { echo "node.sh: $1" >&2; exit 78; }
cd "$(dirname -- "$0")/.." || exit 78
for argument in "$@"; do
  case $argument in --resume | --resume=*)
    refuse "every start would use --resume; run train.py with --resume once, then start this script without it" ;;
  esac
done
# shellcheck disable=SC1091  # setup_lambda.sh creates it
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
command -v torchrun > /dev/null || refuse "there is no torchrun; run 'make install', or activate its environment"
export PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-gpu}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300} # seconds for saving after SIGTERM
# Each rank of this node writes its outcome here, unless it is killed. torchrun's status is 1 for every failure, so it
# does not show the outcome.
LOCKSTEP_EXIT_RECORDS=$(mktemp -d) || exit 78
export LOCKSTEP_EXIT_RECORDS

torchrun train.py "$@" &
trap 'kill -TERM "$!"' TERM
trap 'rm -rf "$LOCKSTEP_EXIT_RECORDS"' EXIT
while wait "$!"; status=$?; kill -0 "$!" 2> /dev/null; do :; done # `wait` returns early after a signal
[ "$status" = 0 ] && exit
grep -Eqs '"outcome": "(error|diverged)"' "$LOCKSTEP_EXIT_RECORDS"/* && exit 78
if [ -z "$(ls "$LOCKSTEP_EXIT_RECORDS")" ]; then # no rank wrote an outcome: check whether torchrun accepts its settings
  parse='from torch.distributed.run import config_from_args, parse_args; config_from_args(parse_args(["train.py"]))'
  problem=$(python -c "$parse" 2>&1)
  [ $? = 1 ] && refuse "torchrun cannot start here: ${problem##*$'\n'}"
fi
exit 75
