#!/usr/bin/env bash
# Start a command on the GPUs of this node: bash scripts/launch.sh train_ppo [flags]. The run_*.sh files call it.
# NPROC: processes of this node, one per GPU; unset: all of its GPUs. Nodes may differ.
# Several nodes: the same command on each, with NNODES, MASTER_ADDR (the first node), MASTER_PORT (free there; 29500) and NODE_RANK
# (0 on the first). A task of srun knows its NODE_RANK by itself.
set -euo pipefail

NPROC=${NPROC:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)}
if ((NPROC == 0)); then
    echo "no GPU found; on another kind of accelerator say how many processes: NPROC=4 bash ..." >&2
    exit 1
fi
if ((${NNODES:-1} > 1)); then
    nodes=(--nnodes "$NNODES" --node-rank "${NODE_RANK:-${SLURM_NODEID:?NODE_RANK says which of the nodes this is: 0, 1, ...}}"
        --master-addr "${MASTER_ADDR:?MASTER_ADDR is the name of the first node}" --master-port "${MASTER_PORT:-29500}")
else
    nodes=(--standalone)
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun "${nodes[@]}" --nproc-per-node "$NPROC" -m "lightrft.cli.$1" "${@:2}"
