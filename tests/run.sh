#!/usr/bin/env bash
# Sets up what tests need, then lint, types and every test this machine can serve, with one summary.
#
#   bash tests/run.sh          one of each kind of event, under 30 minutes on two cores
#   bash tests/run.sh --all    every event
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup.sh"

case ${1:-} in
    '' | --all) all=${1:-} ;;
    *) die "tests/run.sh: unknown argument '$1'. The only one is --all." ;;
esac

printf 'Setting up\n'
setup dev
cd "$REPO"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTHONUNBUFFERED=1
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

# check NAME COMMAND...: run it, and note its exit code and seconds for the summary.
check() {
    local name=$1 start=$SECONDS status=0
    shift
    printf '\n=== %s\n' "$name"
    "$@" </dev/null || status=$?
    printf '%s\t%d\t%d\n' "$name" "$status" $((SECONDS - start)) >>"$results/checks.tsv"
}

# tests NAME MARKERS PATH...: one pytest call.
tests() {
    local name=$1 markers=$2
    shift 2
    check "$name" "$PYTHON" -m pytest -q -m "$markers" --durations=5 \
        --junitxml="$results/$name.xml" "$@"
}

# not_run NAME REASON: said now and again in the summary.
not_run() {
    printf '\n!!! NOT RUN: %s: %s\n' "$1" "$2"
    printf '%s\t%s\n' "$1" "$2" >>"$results/not_run.tsv"
}

# Tests of clusters need a real Slurm, which root can install with apt.
printf '  Finding or installing Slurm ... '
slurm=1
why=$(bash tests/slurm/cluster.sh install 2>&1 >>"$SETUP_LOG") || slurm=0
((slurm)) && printf 'done\n' || not_run slurm "$(tail -n 1 <<<"$why")"

check lint "$PYTHON" -m ruff check .
check format "$PYTHON" -m ruff format --check .
check types "$PYTHON" -m mypy
tests unit "not gpu and not slurm and not model and not slow" tests/unit
tests integration "not gpu and not slurm and not model and not slow" tests/integration
tests model "model and not gpu and not slurm and not slow" tests
if [[ $(package_set) == cuda ]]; then
    tests gpu "gpu and not slurm and not slow" tests
fi
if ((slurm)); then
    tests slurm "slurm and not gpu and not slow" tests/slurm
fi
if [[ $all == --all ]]; then
    without=$([[ $(package_set) == cuda ]] || printf ' and not gpu')
    ((slurm)) || without+=' and not slurm'
    tests slow "slow$without" tests
fi

"$PYTHON" tests/closing_summary.py "$results"
