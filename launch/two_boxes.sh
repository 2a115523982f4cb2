#!/usr/bin/env bash
# Train on nodes that are reachable by ssh. If a node is lost, this script starts again on those that still respond:
#   launch/two_boxes.sh runs/8xa100 10.0.0.1 10.0.0.2 [-- options of train.py]
# The nodes must reach each other at these addresses, and ssh must reach them from here with a key. Each node needs a
# clone at the same path as this one (or at CLONE=path). Ctrl-C makes all nodes save and stop. If the connection is lost
# or the terminal is closed, the nodes continue; run the same command to see the output again. RANKS=8 sets the number
# of ranks per node; the default is one per GPU.
# shellcheck disable=SC2016  # the nodes expand the variables
set -uo pipefail
trap '' PIPE # continue even if nobody reads the output any longer

run=${1-} nodes=()
shift
while [ $# -gt 0 ] && [ "$1" != -- ]; do nodes+=("$1"); shift; done
if [ ${#nodes[@]} = 0 ]; then
  echo "two_boxes.sh: expected a run directory and nodes; see the comment in $0" >&2
  exit 78
fi
repeated=$(printf '%s\n' "${nodes[@]#*@}" | sort | uniq -d | head -n 1)
if [ -n "$repeated" ]; then echo "two_boxes.sh: $repeated is given twice; give each node once" >&2; exit 78; fi

quote() { # WORD...: quote the words for any shell
  local word escaped_quote="'\\''"
  for word in "$@"; do printf "'%s' " "${word//\'/$escaped_quote}"; done
}
options=$(quote "$run" "${@:2}")
# run_on NODE COMMAND: run a command in the node's clone. The status is 255 if the node does not respond, and 78 if the
# clone or the run directory is missing.
run_on() {
  local job
  job=$(quote "$run/.node-${1#*@}")
  ssh -n -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -- "$1" \
    "cd -- $(quote "${CLONE:-$PWD}") && ls -d -- $(quote "$run")launch/node.sh > /dev/null || exit 78
    job=$job; exec 2> /dev/null
    for suffix in pid status log; do [ ! -p \"\$job.\$suffix\" ] || rm \"\$job.\$suffix\"; done # a pipe would hang
    $2"
}
is_running='grep -qs node.sh /proc/$(cat "$job.pid")/cmdline'
# start NODE RANK: start the node in the background, so that it continues if this connection ends.
start() {
  run_on "$1" "rm -f \"\$job.status\"
    export PET_NNODES=${#active[@]} PET_NODE_RANK=$2 PET_MASTER_ADDR=$(quote "${active[0]#*@}") PET_MASTER_PORT=29500
    export PET_NPROC_PER_NODE=$(quote "${RANKS:-gpu}")
    { launch/node.sh $options & echo \$! > \"\$job.pid\"; wait \$!; echo \$? > \"\$job.status\"; } > \"\$job.log\" 2>&1 &"
}
# state NODE: print "running", the exit status of the node's last attempt, "killed", "unreachable", or "absent" if the
# clone or the run directory is missing.
state() {
  run_on "$1" "if $is_running; then echo running; else cat \"\$job.status\" || echo killed; fi"
  case $? in 0) ;; 78) echo absent ;; *) echo unreachable ;; esac
}
stop() { for node in "${active[@]}"; do run_on "$node" "$is_running && kill \$(cat \"\$job.pid\")"; done; }

follow() { # show the output of the first node and wait until no node runs
  local seconds=0
  run_on "${active[0]}" 'sleep 1; tail -n +1 -f --pid=$(cat "$job.pid") "$job.log"' &
  while sleep 5; do
    states=$(for node in "${active[@]}"; do state "$node"; done)
    case $states in
      *running*) if [[ ${states//running/} =~ [0-9]|killed ]]; then ((seconds += 5)); else seconds=0; fi ;;
      *[0-9]* | *killed*) return ;;
      # If all nodes are unreachable, no case applies: this machine has lost its connection, and the loop goes on.
    esac
    if [ $seconds = 120 ]; then stop; fi # some nodes are still waiting for a node that has ended
  done
}

stop_requested='' active=()
trap 'trap "" INT TERM; stop_requested=yes; stop' INT TERM
for attempt in {1..20}; do
  active=() idle=()
  for node in "${nodes[@]}"; do
    case $(state "$node") in
      unreachable) ;;
      running) active+=("$node") ;;
      absent) echo "two_boxes.sh: $node: there is no such clone, or no run directory in it" >&2; exit 78 ;;
      *) idle+=("$node") ;;
    esac
  done
  if [ -n "$stop_requested" ]; then exit 75; fi
  echo "two_boxes.sh: attempt $attempt; running: ${active[*]:-none}, ready: ${idle[*]:-none} of ${nodes[*]}"
  if [ ${#active[@]} = 0 ]; then
    active=("${idle[@]}")
    for rank in "${!active[@]}"; do start "${active[rank]}" "$rank"; done
  fi
  if [ ${#active[@]} -gt 0 ]; then
    follow
    echo "two_boxes.sh: ended with:" "${states//$'\n'/ }"
    case $states in *78*) exit 78 ;; *[1-9]* | *[a-z]*) ;; *) exit 0 ;; esac
  fi
  if [ -n "$stop_requested" ]; then exit 75; fi
  sleep 10
done
exit 75
