#!/usr/bin/env bash
# Run torchrun so that SIGINT and SIGTERM go past it, to its ranks, and start it again after a failure:
#   [RESTARTS=10] scripts/past_torchrun.sh python -m torch.distributed.run ... train.py ...
# A torchrun that is told to stop kills its ranks 30 seconds later (torch 2.11; 2.13 reads TORCH_ELASTIC_SHUTDOWN_TIMEOUT).
# That may be too soon to end a step and to save. Ranks that have ended by themselves with status 0 end torchrun with status 0.
# RESTARTS is for lost hosts: torchrun's own --max-restarts replaces ranks, but without a host it fails on all others. A run
# is not started again if it has finished, was refused, was stopped by a signal, or if the guard has given up.
set -uom pipefail # m: a process group of its own, so that Ctrl-C reaches this script alone

pause_seconds=5 # until the torchruns of the other hosts have failed too
if [[ ! ${RESTARTS:-0} =~ ^[0-9]+$ ]]; then
    echo "error: RESTARTS = $RESTARTS is not a number; write how often torchrun may be started again" >&2
    exit 2
fi

pass_on() {
    interrupted=yes
    stopped=yes
    local ranks
    ranks=$(cat "/proc/$job/task/"*/children 2>/dev/null)
    # shellcheck disable=SC2086 # several numbers
    kill "-$1" ${ranks:-$job} 2>/dev/null
}
stopped=
trap 'pass_on INT' INT
trap 'pass_on TERM' TERM

# Start a command, and wait until it has ended. Its status is in $status.
run() {
    "$@" &
    job=$!
    while true; do
        interrupted=
        wait "$job"
        status=$?
        [[ -n $interrupted ]] || return # a signal ends `wait` too
    done
}

# A rank of train.py makes this file when it ends with a status that another start would not change.
folder=$(mktemp --directory)
export TITAN_SPARSE_ENDED=$folder/ended
trap 'rm -r "$folder"' EXIT

for ((left = ${RESTARTS:-0}; ; left--)); do
    export TITAN_SPARSE_RESTART_COUNT=$((${RESTARTS:-0} - left))
    run "$@"
    if [[ $status -ne 1 || $left -eq 0 || -n $stopped || -e $TITAN_SPARSE_ENDED ]]; then
        exit "$status"
    fi
    echo "host $(hostname): the run has failed and starts again in $pause_seconds s ($left of $RESTARTS restarts are left)" >&2
    run sleep "$pause_seconds"
    [[ -z $stopped ]] || exit 1
done
