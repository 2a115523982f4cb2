#!/usr/bin/env bash
# Train on nodes reached by ssh; when one is lost, start again with those that answer:
#   launch/two_boxes.sh runs/8xa100 10.0.0.1 10.0.0.2 [-- options of train.py]
# Nodes: addresses by which they reach each other and ssh, with a key, reaches them from here; each has a clone at this
# path (or CLONE=path). Ctrl-C saves and stops all of them. A lost connection or a closed terminal stops nothing: the
# same command follows the run again. RANKS=8: ranks per node, by default one per GPU.
# shellcheck disable=SC2016  # variables of the nodes
set -uo pipefail
trap '' PIPE # whoever reads the output may go

run=${1-} nodes=()
shift
while [ $# -gt 0 ] && [ "$1" != -- ]; do nodes+=("$1"); shift; done
if [ ${#nodes[@]} = 0 ]; then echo "two_boxes.sh: wanted a run directory and nodes: see $0" >&2; exit 78; fi
twice=$(printf '%s\n' "${nodes[@]#*@}" | sort | uniq -d | head -n 1)
if [ -n "$twice" ]; then echo "two_boxes.sh: $twice is given twice; give each node once" >&2; exit 78; fi

quoted() { # WORD...: for any shell
  local word quote="'\\''"
  for word in "$@"; do printf "'%s' " "${word//\'/$quote}"; done
}
options=$(quoted "$run" "${@:2}")
on() { # NODE COMMAND: in its clone; status 255 without an answer, 78 without a clone or run directory
  local job
  job=$(quoted "$run/.node-${1#*@}")
  ssh -n -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -- "$1" \
    "cd -- $(quoted "${CLONE:-$PWD}") && ls -d -- $(quoted "$run")launch/node.sh > /dev/null || exit 78
    job=$job; exec 2> /dev/null
    for end in pid status log; do [ ! -p \"\$job.\$end\" ] || rm \"\$job.\$end\"; done # it would hang
    $2"
}
alive='grep -qs node.sh /proc/$(cat "$job.pid")/cmdline'
start() { # NODE RANK: in the background there, where it outlives this connection
  on "$1" "rm -f \"\$job.status\"
    export PET_NNODES=${#gang[@]} PET_NODE_RANK=$2 PET_MASTER_ADDR=$(quoted "${gang[0]#*@}") PET_MASTER_PORT=29500
    export PET_NPROC_PER_NODE=$(quoted "${RANKS:-gpu}")
    { launch/node.sh $options & echo \$! > \"\$job.pid\"; wait \$!; echo \$? > \"\$job.status\"; } > \"\$job.log\" 2>&1 &"
}
state() { # NODE: "running", the status of its last attempt, "killed", "silent", or "absent" without a run directory
  on "$1" "if $alive; then echo running; else cat \"\$job.status\" || echo killed; fi"
  case $? in 0) ;; 78) echo absent ;; *) echo silent ;; esac
}
stop() { for node in "${gang[@]}"; do on "$node" "$alive && kill \$(cat \"\$job.pid\")"; done; }

follow() { # until no node runs
  local seconds=0
  on "${gang[0]}" 'sleep 1; tail -n +1 -f --pid=$(cat "$job.pid") "$job.log"' &
  while sleep 5; do
    states=$(for node in "${gang[@]}"; do state "$node"; done)
    case $states in
      *running*) if [[ ${states//running/} =~ [0-9]|killed ]]; then ((seconds += 5)); else seconds=0; fi ;;
      *[0-9]* | *killed*) return ;; # else all are silent: this connection is lost
    esac
    if [ $seconds = 120 ]; then stop; fi # one waits for another that has ended
  done
}

asked='' gang=()
trap 'trap "" INT TERM; asked=yes; stop' INT TERM
for attempt in {1..20}; do
  gang=() idle=()
  for node in "${nodes[@]}"; do
    case $(state "$node") in
      silent) ;;
      running) gang+=("$node") ;;
      absent) echo "two_boxes.sh: $node: no such clone, or no run directory in it" >&2; exit 78 ;;
      *) idle+=("$node") ;;
    esac
  done
  if [ -n "$asked" ]; then exit 75; fi
  echo "two_boxes.sh: attempt $attempt; running: ${gang[*]:-none}, ready: ${idle[*]:-none} of ${nodes[*]}"
  if [ ${#gang[@]} = 0 ]; then
    gang=("${idle[@]}")
    for rank in "${!gang[@]}"; do start "${gang[rank]}" "$rank"; done
  fi
  if [ ${#gang[@]} -gt 0 ]; then
    follow
    echo "two_boxes.sh: ended:" "${states//$'\n'/ }"
    case $states in *78*) exit 78 ;; *[1-9]* | *[a-z]*) ;; *) exit 0 ;; esac
  fi
  if [ -n "$asked" ]; then exit 75; fi
  sleep 10
done
exit 75
