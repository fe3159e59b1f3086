#!/usr/bin/env bash
# Proves nxtrain right on this machine.
#
#   bash scripts/test.sh [lane ...] [--torch VERSION] [--source DIR] [-- pytest arguments]
#
# Lanes: lint device unit dist xla train faults, all of them by default, and nxd, which needs --source DIR: a checkout of
# NeuronX Distributed. --torch runs them on another torch, without torch-xla and so without the lane xla. The last lines
# name what each lane skipped, and why. Exit code 0 when everything passed, 1 when not, 2 for a wrong call.
set -euo pipefail
here=$PWD
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
source scripts/nxd.sh

usage="usage: test.sh [lane ...] [--torch VERSION] [--source DIR] [-- pytest arguments]"
lanes=() nxd_dir="" nxd_src=""
while [ $# -gt 0 ]; do
    case $1 in
        lint | unit | dist | xla | train | faults | device | nxd) lanes+=("$1") ;;
        --torch) NXTRAIN_TORCH=${2:?--torch needs a version, such as 2.13.0} && shift ;;
        --source) nxd_dir=${2:?--source needs a folder: a checkout of NeuronX Distributed} && shift ;;
        --) shift && break ;;
        *) say "unknown argument $1; $usage" && exit 2 ;;
    esac
    shift
done
has_lane() { [[ " ${lanes[*]} " == *" $1 "* ]]; }
if [ -n "$nxd_dir" ]; then
    [ ${#lanes[@]} -eq 0 ] || has_lane nxd || { say "--source is for the lane nxd; $usage" && exit 2; }
    [ -z "${NXTRAIN_TORCH:-}" ] || { say "NeuronX Distributed runs on torch 2.9.0, not $NXTRAIN_TORCH" && exit 2; }
    nxd_src=$(cd "$here" && nxd_source "$nxd_dir") || exit 2
fi
export NXTRAIN_TORCH="${NXTRAIN_TORCH:-}"  # the demo, which a test runs, sets itself up the same way

has_xla() { "$venv/bin/python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch_xla"))'; }

setup
if has_lane nxd && [ -z "$nxd_src" ]; then
    say "nxd: $(nxd_left_out)" && exit 2
fi
left_out=""
if [ ${#lanes[@]} -eq 0 ]; then
    lanes=(lint)
    for lane in device unit dist xla train faults; do
        [ -z "$(find "tests/$lane" -name 'test_*.py' 2>/dev/null)" ] || lanes+=("$lane")
    done
    if ! has_xla; then
        say "without the lane xla: $venv has no torch-xla"
        lanes=(${lanes[@]/xla/})
    fi
    if [ -n "$nxd_src" ]; then lanes+=(nxd); else left_out=$(nxd_left_out); fi
fi

lint() {
    local code=0
    "$venv/bin/ruff" check . || code=1
    "$venv/bin/ruff" format --check . || code=1
    "$venv/bin/mypy" || code=1
    "$venv/bin/lint-imports" --no-logo || code=1
    return $code
}

# One process per lane, since torch-xla and the process groups leave traces in theirs.
run_lane() {
    case $1 in
        lint) lint ;;
        nxd) nxd_run "$nxd_src" "${@:2}" ;;
        dist) OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest tests/dist "${@:2}" ;;  # the ranks share the cores
        *) "$venv/bin/python" -m pytest "tests/$1" "${@:2}" ;;
    esac
}

summary=() failed=0 ran=0
NXTRAIN_TEST_SKIPS="$(mktemp)" && export NXTRAIN_TEST_SKIPS  # lanes append what they skip, and why
judge() {  # lane, seconds, exit code
    local lane=$1 seconds=$2 verdict
    case $3 in
        0) verdict=passed ran=1 ;;
        5) verdict="no test selected" ;;  # pytest's exit code for an empty selection, such as -k of another lane's test
        *) verdict=FAILED failed=1 ;;
    esac
    summary+=("$(printf '%-7s %5d s  %s' "$lane" "$seconds" "$verdict")")
}

# The lane xla keeps one core busy, and dist waits for processes, so xla runs beside unit and dist. What is timed (train,
# faults) runs alone.
log=build/xla.log
start_xla() {
    mkdir -p build && rm -f "$log.end"
    say "=== xla runs beside unit and dist; what it says comes after them, and is in $log meanwhile"
    (
        begin=$SECONDS code=0
        OMP_NUM_THREADS=1 run_lane xla "$@" || code=$?
        echo $((SECONDS - begin)) $code >"$log.end"
    ) >"$log" 2>&1 </dev/null &
    xla=$!
    trap 'kill $xla 2>/dev/null || true' EXIT
}
finish_xla() {
    say "=== xla"
    wait $xla || true
    cat "$log"
    judge xla $(cat "$log.end")
}

xla=
for lane in "${lanes[@]}"; do
    if [ "$lane" = dist ] || [ "$lane" = unit ]; then
        [ -n "$xla" ] || ! has_lane xla || ! has_lane dist || start_xla "$@"
    elif [ "$lane" = xla ] && [ -n "$xla" ]; then
        finish_xla
        continue
    fi
    say "=== $lane"
    begin=$SECONDS code=0
    run_lane "$lane" "$@" || code=$?
    judge "$lane" $((SECONDS - begin)) $code
done

printf '\n%s' "torch $("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')" "${summary[@]}"
[ -z "$left_out" ] || printf '\n%-7s %s' nxd "$left_out"
printf '\n' && cat "$NXTRAIN_TEST_SKIPS" && rm "$NXTRAIN_TEST_SKIPS"
[ $failed = 0 ] && [ $ran = 1 ]
