#!/usr/bin/env bash
# Start a command on the GPUs of this node: bash scripts/launch.sh train_ppo [flags]. The run_*.sh files call it.
# NPROC: processes of this node, one per GPU; unset: all of its GPUs. Nodes may differ.
# Several nodes: the same command on each, with NNODES, MASTER_ADDR (the first node), MASTER_PORT (free there; 29500) and NODE_RANK
# (0 on the first). Where these are not set, the variables of Kubeflow (PET_*, or PyTorchJob's RANK and WORLD_SIZE, which count pods),
# SkyPilot, Slurm and Kubernetes have their values.
# NUMA_BINDING: how torchrun binds each rank to the cores near its GPU (node), or none.
# NNODES=2:3: start with two or three nodes; if one is lost, the others go on from the newest checkpoint (docs/launching.md).
set -euo pipefail

nproc=${NPROC:-${PET_NPROC_PER_NODE:-${SKYPILOT_NUM_GPUS_PER_NODE:-auto}}}
nodes=${NNODES:-${PET_NNODES:-${SKYPILOT_NUM_NODES:-${WORLD_SIZE:-${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}}}}}
rank=${NODE_RANK:-${PET_NODE_RANK:-${SKYPILOT_NODE_RANK:-${RANK:-${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-}}}}}}
first=${MASTER_ADDR:-${PET_MASTER_ADDR:-${SKYPILOT_NODE_IPS:-}}}
first=${first%%$'\n'*} # SkyPilot lists the addresses of all nodes
port=${MASTER_PORT:-${PET_MASTER_PORT:-29500}}
meeting=${PET_RDZV_ENDPOINT:-${first:+$first:$port}}

if [[ $nproc == auto || $nproc == gpu ]]; then
    nproc=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
fi
if [[ $nproc == 0 ]]; then
    echo "no GPU found; on another kind of accelerator say how many processes: NPROC=4 bash ..." >&2
    exit 1
fi
if [[ $nodes == 1 ]]; then
    where=(--standalone)
elif [[ -z $meeting ]]; then
    echo "this is one of $nodes nodes: MASTER_ADDR is the name of the first node" >&2
    exit 1
elif [[ $nodes == *:* || -n ${PET_RDZV_ENDPOINT:-} ]]; then
    where=(--nnodes "$nodes" --rdzv-backend "${PET_RDZV_BACKEND:-c10d}" --rdzv-endpoint "$meeting"
        --rdzv-id "${PET_RDZV_ID:-$meeting}" --max-restarts "${PET_MAX_RESTARTS:-3}")
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # the ranks of each restart meet at their own rank 0, which may be on another node
elif [[ -z $rank ]]; then
    echo "this is one of $nodes nodes: NODE_RANK says which of the nodes this is: 0, 1, ..." >&2
    exit 1
else
    where=(--nnodes "$nodes" --node-rank "$rank" --master-addr "$first" --master-port "$port")
fi

# torchrun takes a GPU whose NUMA node is unknown for one of node 0, and fails if the job may not use a core of the node or has no numactl.
numa_is_known() {
    local address addresses node
    addresses=$(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader 2>/dev/null) && [[ -n $addresses && -n ${CUDA_VISIBLE_DEVICES-all} ]] || return
    for address in ${addresses,,}; do
        node=$(cat "/sys/bus/pci/devices/${address: -12}/numa_node" 2>/dev/null) || return
        ((node >= 0)) && numactl --cpunodebind="$node" true &>/dev/null || return
    done
}

binding=${NUMA_BINDING:-node}
if [[ $binding != none ]] && numa_is_known; then
    where+=(--numa-binding "$binding")
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun "${where[@]}" --nproc-per-node "$nproc" -m lightrft "$1" "${@:2}"
