#!/usr/bin/env bash
# Runs the tests of nxtrain on this machine.
#
#   bash scripts/test.sh [lane ... | all | quick] [--slow] [--torch VERSION] [--source DIR] [-- pytest arguments]
#
# Without a lane: lint, every unit test, and the covering set of each other lane (tests/covering.txt). `all` runs every
# lane whole, as continuous integration does. `quick` is for each edit: lint, the fast unit tests, and a
# smoke test of each other lane.
# Lanes: lint device unit dist xla train faults cuda-sim, and nxd, which needs --source DIR: a checkout of NeuronX
# Distributed. --slow adds tests marked slow, which repeat a proof at a larger size. --torch runs the lanes on another
# torch, without torch-xla and the lane xla. The last lines name the skipped tests of each lane with the reason. The
# exit code is 0 if everything passed, 1 if not, 2 for a wrong call, and 130 after an interrupt.
#
# Lanes that wait for processes run several tests at once. Tests marked `alone` measure time: they run one
# after the other at the end. The pytest arguments -n 0, --pdb and -s run one test at a time.
set -euo pipefail
here=$PWD
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
source scripts/nxd.sh
source scripts/lanes.sh

usage="usage: test.sh [lane ... | all | quick] [--slow] [--torch VERSION] [--source DIR] [-- pytest arguments]; test.sh --help"
help() { sed -n '2,/^set /s/^# \{0,1\}//p' scripts/test.sh; }
lanes=() nxd_dir="" nxd_src="" slow=()
while [ $# -gt 0 ]; do
    case $1 in
        lint | unit | dist | xla | train | faults | device | cuda-sim | nxd | all | quick) lanes+=("$1") ;;
        --slow) slow=(--slow) ;;
        --torch) NXTRAIN_TORCH=${2:?--torch needs a version, such as 2.13.0} && shift ;;
        --source) nxd_dir=${2:?--source needs a folder: a checkout of NeuronX Distributed} && shift ;;
        -h | --help) help && exit ;;
        --) shift && break ;;
        *) say "unknown argument $1; $usage" && exit 2 ;;
    esac
    shift
done
has_lane() { [[ " ${lanes[*]} " == *" $1 "* ]]; }
for word in all quick; do
    has_lane $word && [ ${#lanes[@]} -gt 1 ] && say "$word is a choice from all lanes; $usage" && exit 2
done
tier=whole
if [ ${#lanes[@]} -eq 0 ] && [ ${#slow[@]} -eq 0 ]; then tier=covering; fi
if has_lane all; then lanes=(); fi
if [ -n "$nxd_dir" ]; then
    [ ${#lanes[@]} -eq 0 ] || has_lane nxd || { say "--source is for the lane nxd; $usage" && exit 2; }
    [ -z "${NXTRAIN_TORCH:-}" ] || { say "NeuronX Distributed runs on torch 2.9.0, not $NXTRAIN_TORCH" && exit 2; }
    nxd_src=$(cd "$here" && nxd_source "$nxd_dir") || exit 2
fi
export NXTRAIN_TORCH="${NXTRAIN_TORCH:-}"  # the demo, which a test runs, uses the same environment

has_xla() { "$venv/bin/python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch_xla"))'; }

setup
if has_lane nxd && [ -z "$nxd_src" ]; then
    say "nxd: $(nxd_left_out)" && exit 2
fi
left_out="" quick=()
if has_lane quick; then
    lanes=(lint unit smokes) quick=(--quick)
elif [ ${#lanes[@]} -eq 0 ]; then
    lanes=(lint)
    for lane in device unit dist xla train faults cuda-sim; do
        [ -z "$(find "$(folder_of $lane)" -name 'test_*.py' 2>/dev/null)" ] || lanes+=("$lane")
    done
    if ! has_xla; then
        say "without the lane xla: $venv has no torch-xla"
        lanes=(${lanes[@]/xla/})
    fi
    if [ -n "$nxd_src" ]; then lanes+=(nxd); else left_out=$(nxd_left_out); fi
fi

unset PYTHONDONTWRITEBYTECODE  # each worker would compile all tests, and each started command all of nxtrain
NXTRAIN_TEST_SKIPS="$(mktemp)" && export NXTRAIN_TEST_SKIPS  # lanes append their skipped tests and the reasons
run_lanes ${slow[@]+"${slow[@]}"} "$@"

printf '\n%s' "torch $("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')"
summary
[ -z "$left_out" ] || printf '\n%-8s %s' nxd "$left_out"
printf '\n' && cat "$NXTRAIN_TEST_SKIPS" && rm "$NXTRAIN_TEST_SKIPS"
all_passed
