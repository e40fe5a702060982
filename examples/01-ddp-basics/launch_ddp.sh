#!/usr/bin/env bash
# Start a DDP script on one machine, on several, or under Slurm:
#
#   bash launch_ddp.sh local                                             # RANKS ranks on this machine
#   RANKS=8 bash launch_ddp.sh local --epochs 20                         # further arguments are the script's own
#
#   RANKS=16 NNODES=2 NODE_RANK=0 RDZV=node0:29400 bash launch_ddp.sh multi       # on the first machine
#   RANKS=16 NNODES=2 NODE_RANK=1 RDZV=node0:29400 bash launch_ddp.sh multi       # on the second one
#
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 launch_ddp.sh slurm    # one task a rank
#
# SCRIPT chooses the script (default: ddp_training.py beside this file); any script that runs under torchrun will do.
set -euo pipefail

# Slurm runs a copy of a batch script from its spool, so there the folder is the one that sbatch was called in.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ -f $here/ddp_training.py ]] || here=${SLURM_SUBMIT_DIR:-$PWD}
script=${SCRIPT:-$here/ddp_training.py}

usage() {
    sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

need() { # need NAME: an environment variable that this mode cannot do without
    [[ -n ${!1:-} ]] || { echo "launch_ddp.sh: set $1 (see the head of this file)" >&2; exit 2; }
}

# RANKS unset: every GPU of the machine, or one rank on the CPU.
local_ranks() {
    exec phalanx train --script "$script" ${RANKS:+--num-workers "$RANKS"} -- "$@"
}

# The same command on every machine; only NODE_RANK differs. RANKS counts the ranks of all machines together.
several_nodes() {
    need NNODES && need NODE_RANK && need RDZV && need RANKS
    exec phalanx train --script "$script" --num-workers "$RANKS" --num-nodes "$NNODES" \
        --node-rank "$NODE_RANK" --rdzv-endpoint "$RDZV" -- "$@"
}

# Slurm starts the ranks itself. Its variables are given torchrun's names, so that plain torch scripts run as well.
slurm() {
    need SLURM_JOB_ID && need SLURM_JOB_NODELIST
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
    export MASTER_ADDR MASTER_PORT
    # The single quotes are meant: each task fills in its own numbers.
    # shellcheck disable=SC2016
    exec srun --kill-on-bad-exit=1 bash -c '
        export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS GROUP_RANK=$SLURM_NODEID
        export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[(,]*}
        exec python "$@"' rank "$script" "$@"
}

mode=${1:-}
shift || usage
case $mode in
    local) local_ranks "$@" ;;
    multi) several_nodes "$@" ;;
    slurm) slurm "$@" ;;
    *) usage ;;
esac
