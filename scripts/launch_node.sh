#!/usr/bin/env bash
# Train on all GPUs of this node:   scripts/launch_node.sh train_configs/X.toml [--section.key value ...]
#   GPUS=4        fewer processes than there are GPUs      PYTHON=python3     another interpreter
#   RESTARTS=3    after a failure, start again and resume from the newest checkpoint, at most so many times
# How long ranks wait for each other is in the configuration: parallelism.first_step_timeout_seconds, timeout_seconds.
set -euo pipefail
if [[ $# -lt 1 || $1 == -* ]]; then
    echo "usage: $0 train_configs/X.toml [--section.key value ...]" >&2
    exit 2
fi
config=$(realpath "$1")
cd "$(dirname "$(realpath "$0")")/.."

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# When a collective times out, torch writes down what NCCL was doing.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}

# Ctrl-C ends the run after a save, within training.stop_grace_seconds; a second Ctrl-C ends it at once.
exec scripts/past_torchrun.sh "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "${GPUS:-gpu}" train.py --config "$config" "${@:2}"
