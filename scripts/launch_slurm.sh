#!/usr/bin/env bash
# Train over many nodes with Slurm, from the project's folder, which all nodes see:
#   sbatch --nodes 4 scripts/launch_slurm.sh train_configs/X.toml [--section.key value ...]
# One task a node starts one process a GPU. Five minutes before the time limit all processes get SIGTERM: they end their step,
# or leave it out if that takes too long, save if checkpoint.enable is true, and the same command goes on from there.
# After a failure all nodes start again, and resume from the newest checkpoint, at most RESTARTS times (3). If Slurm finds a
# node dead, it ends the job and, thanks to --requeue, starts it again with other nodes.
#SBATCH --job-name=titan_sparse
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
if [[ $# -lt 1 || $1 == -* ]]; then
    echo "usage: sbatch --nodes N $0 train_configs/X.toml [--section.key value ...]" >&2
    exit 2
fi
if [[ -z ${SLURM_JOB_ID:-} ]]; then
    echo "error: not inside of a Slurm job; start with sbatch, or use scripts/launch_node.sh on one node" >&2
    exit 2
fi
cd "$SLURM_SUBMIT_DIR" # Slurm runs a copy of this script from elsewhere

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export RESTARTS=${RESTARTS:-3}
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
# Where Slurm signals torchrun too, and not only past_torchrun.sh. Torch 2.13 reads it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-280}

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000)) # two jobs on one head node do not meet

# [parallelism] of the configuration says how long ranks wait; --kill-on-bad-exit frees the nodes when one fails.
# The grace is what SIGTERM comes before the end, less some time for what lasts longer than it did before.
srun --kill-on-bad-exit=1 scripts/past_torchrun.sh "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "${GPUS:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$SLURM_JOB_ID" \
    train.py --config "$1" --training.stop_grace_seconds 240 "${@:2}"
