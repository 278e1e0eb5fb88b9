#!/usr/bin/env bash
# Run torchrun so that SIGINT and SIGTERM go past it, to its ranks:   scripts/past_torchrun.sh python -m torch.distributed.run ...
# A torchrun that is told to stop kills its ranks 30 seconds later (torch 2.11; 2.13 reads TORCH_ELASTIC_SHUTDOWN_TIMEOUT).
# That may be too soon to end a step and to save. Ranks that have ended by themselves with status 0 end torchrun with status 0.
set -uom pipefail # m: a process group of its own, so that Ctrl-C reaches this script alone
"$@" &
torchrun=$!

pass_on() {
    interrupted=yes
    local ranks
    ranks=$(cat "/proc/$torchrun/task/"*/children 2>/dev/null)
    # shellcheck disable=SC2086 # several numbers
    kill "-$1" ${ranks:-$torchrun} 2>/dev/null
}
trap 'pass_on INT' INT
trap 'pass_on TERM' TERM

while true; do
    interrupted=
    wait "$torchrun"
    status=$?
    [[ -n $interrupted ]] || exit "$status" # a signal ends `wait` too
done
