# Sourced by test.sh. The lane nxd: the code of NeuronX Distributed on CPU, from its source, in an environment of its own.

NXD_COMMIT=fbac349b61a3adbb123c2983835af692840ff62f
NXD_VERSION=0.18.0
NXD_REPOSITORY=https://github.com/aws-neuron/neuronx-distributed
# Factor on the time limits of the processes: some import for a minute where others compute beside them.
NXD_PATIENCE=5
NXD_TEST_LIMIT_S=1500
nxd_lanes=(dist xla device)

# The way to run the lane, for people.
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
    # Without .git, as in an archive, the version alone says what the source is.
    top=$(cd -P "$src" && git rev-parse --show-toplevel 2>/dev/null) || top=""
    [ "$top" = "$(cd -P "$src/.." && pwd)" ] && head=$(git -C "$top" rev-parse HEAD) || head=""
    if [ "$version" != "$NXD_VERSION" ] || [ "${head:-$NXD_COMMIT}" != "$NXD_COMMIT" ]; then
        say "error: --source $1 is NeuronX Distributed ${version:-of no version}${head:+ at ${head:0:7}}, and the lane nxd knows $NXD_VERSION at ${NXD_COMMIT:0:7}; $(nxd_way_out)"
        return 2
    fi
    (cd -P "$src" && pwd)
}

# How many tests the lane has.
nxd_count() {
    local lane count=0 found
    for lane in "${nxd_lanes[@]}"; do
        found=$("$venv/bin/python" -m pytest "tests/$lane" -m nxd --collect-only -q 2>/dev/null | grep -c '::') || true
        count=$((count + found))
    done
    echo $count
}

nxd_left_out() { echo "left out: $(nxd_count) tests that need the source of NeuronX Distributed $NXD_VERSION; $(nxd_way_out)"; }

# Run the lane in a subshell, whose environment is NxD's: folder to import from, pytest arguments.
nxd_run() (
    src=$1 example="$1/../examples/training/llama/modeling_llama_nxd.py" code=5
    (setup nxd) || exit 1  # its own code is pytest's for an empty selection
    setup nxd
    export PYTHONPATH="$src${PYTHONPATH:+:$PYTHONPATH}" NXTRAIN_TEST_PATIENCE=$NXD_PATIENCE OMP_NUM_THREADS=1
    if [ -f "$example" ]; then
        export NXD_EXAMPLE="$example"
    elif [ -z "${NXD_EXAMPLE:-}" ]; then
        say "no $example: without the tests of the example's model; NXD_EXAMPLE=FILE names one"
    fi
    why_not=$("$venv/bin/python" -c 'from tests.conftest import why_no_nxd; print(why_no_nxd())')
    [ -z "$why_not" ] || { say "error: $why_not" && exit 1; }
    for lane in "${nxd_lanes[@]}"; do  # one process each, as in their own lanes
        say "=== nxd: $lane"
        found=0
        "$venv/bin/python" -m pytest "tests/$lane" -m nxd --timeout "$NXD_TEST_LIMIT_S" "${@:2}" || found=$?
        case $found in
            5) ;;  # an empty selection here says nothing of the other lanes
            0) [ $code != 5 ] || code=0 ;;
            *) code=$found ;;
        esac
    done
    exit $code
)
