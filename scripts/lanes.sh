# Sourced by test.sh: schedules the test lanes on the cores of this machine.
#
# Lanes run in sequence, and each keeps all cores busy: `dist` with a test per core, `unit`, `train` and
# `cuda-sim` with one more, since some tests wait for processes, and `faults` with two, since its tests also wait for
# limits.
#
# `xla` uses one core, so it runs in the background of `dist` and later lanes. Lanes that start meanwhile run one test
# less at once, but at least two. `faults` mostly waits, and runs in the background of `train` and later lanes. `lint`
# is mostly mypy on one core, and runs in the background of the first lanes. Tests marked `alone` run last, on an idle
# machine.

cores=$(getconf _NPROCESSORS_ONLN)
at_once=$((cores < 4 ? cores : 4))  # a test of a lane may start eight processes, each of half a gigabyte

# Tests of the lanes that start ranks which `quick` selects.
smokes=(
    "tests/dist/test_drawn_parity.py::test_a_drawn_run_of_any_layout_equals_transformers[1-tp1-pp2x2-dp1-grad_op]"
    "tests/dist/test_drawn_parity.py::test_a_drawn_run_of_any_layout_equals_transformers[14-tp3-pp2x3-dp1-full]"
    "tests/dist/test_checkpoint_shard_modes.py::test_a_changed_cut_changes_no_bit[fp32-none]"
    "tests/xla/test_graphs.py::test_all_ranks_of_4096_record_a_graph_per_micro_batch_and_one_to_update"
    "tests/xla/test_drawn_parity.py::test_drawn_runs_on_devices_equal_transformers[1 devices]"
    "tests/train/test_resume.py::test_going_on_after_any_step_is_the_straight_run[tp2-sp-3]"
    "tests/faults/test_kills.py::test_in_a_step[1]"
)

folder_of() { echo "tests/${1//-/_}"; }  # a Python module name has no dash

# The tests of a lane: all of them, or its covering set.
selection() {
    local folder
    folder=$(folder_of "$1")
    if [ "$tier" = covering ] && grep -q "^$folder/" tests/covering.txt; then
        grep "^$folder/" tests/covering.txt
    else
        echo "$folder"
    fi
}

lint() {
    local code=0
    "$venv/bin/ruff" check . || code=1
    "$venv/bin/ruff" format --check . || code=1
    if [ -z "$NXTRAIN_TORCH" ]; then
        "$venv/bin/mypy" || code=1
    else
        say "without mypy: the annotations are checked with the types of torch 2.9, which other releases change"
    fi
    "$venv/bin/lint-imports" --no-logo || code=1
    return $code
}

# Run pytest with several tests at once. Arguments: their number, pytest's arguments. --pdb and -s run one at a time.
at_once() {
    local workers=$1 word
    shift
    if is_behind xla; then workers=$((workers > 2 ? workers - 1 : workers)); fi
    for word in "$@"; do
        case $word in --pdb | --trace | -s | --capture=no) workers=0 ;; esac
    done
    # Several processes already share the cores, so threads in each process would only slow each other down.
    OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
}

# Run a lane without its tests marked `alone`. Arguments: lane, pytest's arguments. Each lane needs its own process,
# since torch-xla and process groups leave state behind.
run_lane() {
    local lane=$1 tests workers
    shift
    mapfile -t tests < <(selection "$lane")
    case $lane in
        lint) lint ;;
        nxd) nxd_run "$nxd_src" "$@" ;;
        xla) OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest "${tests[@]}" "$@" ;;
        unit)
            workers=$((at_once + 1))
            if [ ${#quick[@]} -gt 0 ]; then workers=$at_once; fi  # fast tests wait for nothing
            at_once "$workers" "${tests[@]}" --alone=without ${quick[@]+"${quick[@]}"} "$@"
            ;;
        dist) at_once "$at_once" "${tests[@]}" --alone=without "$@" ;;
        cuda-sim) at_once $((at_once + 1)) "${tests[@]}" "$@" ;;
        smokes) at_once "$at_once" "${smokes[@]}" "$@" ;;
        train) at_once $((at_once + 1)) "${tests[@]}" --alone=without "$@" ;;
        faults) at_once $((at_once + 2)) "${tests[@]}" --alone=without "$@" ;;
        *) "$venv/bin/python" -m pytest "${tests[@]}" "$@" ;;
    esac
}

# Run the tests of a lane that are marked `alone`.
run_alone() {
    local tests
    mapfile -t tests < <(selection "$1")
    "$venv/bin/python" -m pytest "${tests[@]}" --alone=only ${quick[@]+"${quick[@]}"} "${@:2}"
}

code_of() { local of="code_${1//-/_}" && echo "${!of:-5}"; }
is_judged() { local of="code_${1//-/_}" && [ -n "${!of:-}" ]; }
took() { local of="took_${1//-/_}" && echo "${!of:-0}"; }

# Add the result of a part of a lane to the lane's verdict. Arguments: lane, seconds, exit code. pytest's exit code 5 is
# an empty selection, such as -k of another lane's test, and does not affect the verdict of the other part.
judge() {
    local name=${1//-/_}  # a variable name has no dash
    printf -v "took_$name" %d $(($(took "$1") + $2))
    case $(code_of "$1") in
        5) printf -v "code_$name" %d "$3" ;;
        0) [ "$3" = 5 ] || printf -v "code_$name" %d "$3" ;;
    esac
}

summary() {
    local lane verdict
    for lane in "${lanes[@]}"; do
        case $(code_of "$lane") in
            0) verdict=passed ;;
            5) verdict="no test selected" ;;
            *) verdict=FAILED ;;
        esac
        printf '\n%-8s %5d s  %s' "$lane" "$(took "$lane")" "$verdict"
    done
}

# Succeed if at least one test ran, and none failed.
all_passed() {
    local lane none=1
    for lane in "${lanes[@]}"; do
        case $(code_of "$lane") in
            0) none=0 ;;
            5) ;;
            *) return 1 ;;
        esac
    done
    return $none
}

timed() {  # lane, function, pytest's arguments
    local begin=$SECONDS code=0
    "$2" "$1" "${@:3}" || code=$?
    judge "$1" $((SECONDS - begin)) $code
}

behind=()
is_behind() { [[ " ${behind[*]-} " == *" $1 "* ]]; }
pid_of() { local of="pid_$1" && echo "${!of}"; }

# Start a lane in the background of later lanes. Arguments: lane, pytest's arguments.
start_behind() {
    local lane=$1 log=build/$1.log
    mkdir -p build && rm -f "$log.end"
    say "=== $lane runs behind the lanes that follow; its output comes after them, and is in $log meanwhile"
    set -m  # a separate process group, which one signal ends, and which accepts an interrupt
    (
        begin=$SECONDS code=0
        run_lane "$@" || code=$?
        echo $((SECONDS - begin)) $code >"$log.end"
    ) >"$log" 2>&1 </dev/null &
    printf -v "pid_$lane" %d $!
    set +m
    behind+=("$lane")
}

# Collect the results of background lanes: of those that `ended`, or of `all` after waiting for them.
finish_behind() {
    local lane seconds code left=()
    for lane in ${behind[@]+"${behind[@]}"}; do
        if [ "$1" = ended ] && [ ! -e "build/$lane.log.end" ]; then left+=("$lane") && continue; fi
        say "=== $lane"
        wait "$(pid_of "$lane")" || true
        cat "build/$lane.log"
        read -r seconds code <"build/$lane.log.end"
        judge "$lane" "$seconds" "$code"
    done
    behind=(${left[@]+"${left[@]}"})
}

# End background lanes and their ranks: an interrupt first, so that tests end their processes.
end_behind() {
    local lane pid waited
    for lane in ${behind[@]+"${behind[@]}"}; do
        pid=$(pid_of "$lane")
        kill -INT -- "-$pid" 2>/dev/null || continue
        for waited in {1..50}; do
            kill -0 -- "-$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL -- "-$pid" 2>/dev/null || true
    done
}

# Run all lanes: pytest's arguments.
run_lanes() {
    local lane
    trap end_behind EXIT
    trap 'say "interrupted"; exit 130' INT TERM  # pytest ends itself at an interrupt, and no lane must start after it
    for lane in "${lanes[@]}"; do
        if [ "$lane" = lint ] && [ ${#lanes[@]} -gt 1 ]; then start_behind lint; fi
        if [ "$lane" = dist ] && has_lane xla; then start_behind xla "$@"; fi
        if [ "$lane" = train ] && has_lane faults; then start_behind faults "$@"; fi
        if is_behind "$lane" || is_judged "$lane"; then continue; fi
        say "=== $lane"
        timed "$lane" run_lane "$@"
        finish_behind ended
    done
    finish_behind all
    for lane in "${lanes[@]}"; do
        case $lane in
            unit | dist | train | faults)
                say "=== $lane: what runs alone"
                timed "$lane" run_alone "$@" ;;
        esac
    done
}
