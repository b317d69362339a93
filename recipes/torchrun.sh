#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One node of a run with torchrun. Start it on each:  FIRST=10.0.0.1 NODE=0 NODES=2 SHARED=/shared/run-7 torchrun.sh
#   FIRST   address of node 0         NODE, NODES  this node's number, from 0, and how many there are
#   SHARED  an empty folder that all nodes share, for the keys and the queue's address
#   GPUS    ranks per node (1)        MEMORY       of each node's values (4GiB)
#   WAIT_S  seconds that the other nodes wait for node 0 to serve (600)
set -euo pipefail
: "${SHARED:?set SHARED to an empty folder that all nodes see}" "${FIRST:?set FIRST to the address of node 0}"
: "${NODE:?set NODE to the number of this node, from 0}" "${NODES:?set NODES to the number of nodes}"
if ((NODE == 0)) && [[ -e $SHARED/address || -e $SHARED/failed ]]; then
  echo "error: $SHARED is of an earlier run. Set SHARED to an empty folder that all nodes see." >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
server=
end() {
  local code=$?
  ((code == 0)) || touch "$SHARED/failed" # so that the other nodes end, whatever they wait for
  ((NODE > 0)) || rm -f "$SHARED/keys"    # every server has read them, or never will
  # shellcheck disable=SC2046  # they are words
  kill $server $(jobs -p) 2>/dev/null || true
  wait
  exit "$code"
}
trap end EXIT

serve=(lightning-tq serve --listen "tcp://0.0.0.0:${TQ_PORT:-0}" --key-file "$SHARED/keys" --memory "${MEMORY:-4GiB}")
if ((NODE > 0)); then
  until [ -s "$SHARED/address" ]; do
    if [ -e "$SHARED/failed" ]; then
      echo "error: another node has failed before node 0 could serve, and says why." >&2
      exit 1
    elif ((SECONDS > ${WAIT_S:-600})); then
      echo "error: node 0 has not written $SHARED/address within ${WAIT_S:-600} s. Has it started, with this folder?" >&2
      exit 1
    fi
    sleep 1
  done
  serve+=(--join "$(cat "$SHARED/address")")
fi
exec {ready}< <(exec "${serve[@]}")
server=$!
read -r _ local remote <&"$ready" # fails if the server has ended; it has said why
if ((NODE == 0)); then
  echo "tcp://$FIRST:${remote##*:}" >"$SHARED/address.new"
  mv "$SHARED/address.new" "$SHARED/address" # never read half
fi

export TQ_ADDRESS=$local TQ_KEY_FILE=$SHARED/keys
python "$here/rollout.py" --worker "$NODE" --workers "$NODES" &
rollout=$!
torchrun --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "${GPUS:-1}" --master-addr "$FIRST" \
  --master-port "${MASTER_PORT:-29500}" "$here/train.py" --nodes "$NODES" --devices "${GPUS:-1}" &
trainer=$!
{ until [ -e "$SHARED/failed" ]; do sleep 2; done && exit 1; } &
elsewhere=$!
wait -n -p ended "$rollout" "$trainer" "$elsewhere" # what fails ends this script
[ "$ended" = "$trainer" ] || wait -n "$trainer" "$elsewhere"
