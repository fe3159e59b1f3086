# Sourced by test.sh. Lane nxd: tests with the code of NeuronX Distributed, from source, on CPU. It has its own
# environment.

NXD_COMMIT=fbac349b61a3adbb123c2983835af692840ff62f
NXD_VERSION=0.18.0
NXD_REPOSITORY=https://github.com/aws-neuron/neuronx-distributed
# Factor of the time limits of test processes, some of which import for a minute on a busy machine.
NXD_PATIENCE=5
NXD_TEST_LIMIT_S=1500
nxd_lanes=(dist xla device)

# Usage of the lane, for messages.
nxd_way_out() { echo "git clone $NXD_REPOSITORY, check out ${NXD_COMMIT:0:7}, then: bash scripts/test.sh nxd --source DIR"; }

# Print the folder to import from, in a checkout or in its src; one line and exit code 2 for any other folder.
nxd_source() {
    local src top head version
    for src in "$1/src" "$1"; do
        [ -f "$src/neuronx_distributed/_version.py" ] && break
    done
    if [ ! -f "$src/neuronx_distributed/_version.py" ]; then
        say "error: --source $1 holds no NeuronX Distributed: neither src/neuronx_distributed nor neuronx_distributed; $(nxd_way_out)"
        return 2
    fi
    version=$(sed -n "s/^__version__ = [\"']\(.*\)[\"']$/\1/p" "$src/neuronx_distributed/_version.py")
    # Without .git, as in an archive, only the version identifies the source.
    top=$(cd -P "$src" && git rev-parse --show-toplevel 2>/dev/null) || top=""
    [ "$top" = "$(cd -P "$src/.." && pwd)" ] && head=$(git -C "$top" rev-parse HEAD) || head=""
    if [ "$version" != "$NXD_VERSION" ] || [ "${head:-$NXD_COMMIT}" != "$NXD_COMMIT" ]; then
        say "error: --source $1 is NeuronX Distributed ${version:-of no version}${head:+ at ${head:0:7}}, and the lane nxd knows $NXD_VERSION at ${NXD_COMMIT:0:7}; $(nxd_way_out)"
        return 2
    fi
    (cd -P "$src" && pwd)
}

# Count the tests of the lane.
nxd_count() {
    local lane count=0 found
    for lane in "${nxd_lanes[@]}"; do
        found=$("$venv/bin/python" -m pytest "tests/$lane" -m nxd --collect-only -q 2>/dev/null | grep -c '::') || true
        count=$((count + found))
    done
    echo $count
}

nxd_left_out() { echo "left out: $(nxd_count) tests that need the source of NeuronX Distributed $NXD_VERSION; $(nxd_way_out)"; }

# Run the lane in a subshell with NxD's environment. Arguments: folder to import from, pytest arguments.
nxd_run() (
    src=$1 example="$1/../examples/training/llama/modeling_llama_nxd.py" code=5
    (setup nxd) || exit 1  # the exit code of setup equals pytest's code for an empty selection
    setup nxd
    export PYTHONPATH="$src${PYTHONPATH:+:$PYTHONPATH}" NXTRAIN_TEST_PATIENCE=$NXD_PATIENCE OMP_NUM_THREADS=1
    if [ -f "$example" ]; then
        export NXD_EXAMPLE="$example"
    elif [ -z "${NXD_EXAMPLE:-}" ]; then
        say "no $example: without the tests of the example's model; NXD_EXAMPLE=FILE names one"
    fi
    why_not=$("$venv/bin/python" -c 'from tests.conftest import why_no_nxd; print(why_no_nxd())')
    [ -z "$why_not" ] || { say "error: $why_not" && exit 1; }
    for lane in "${nxd_lanes[@]}"; do  # one process per lane
        say "=== nxd: $lane"
        found=0
        "$venv/bin/python" -m pytest "tests/$lane" -m nxd --timeout "$NXD_TEST_LIMIT_S" "${@:2}" || found=$?
        case $found in
            5) ;;  # an empty selection does not affect the other lanes
            0) [ $code != 5 ] || code=0 ;;
            *) code=$found ;;
        esac
    done
    exit $code
)
