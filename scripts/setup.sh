# Sourced by the other scripts. Creates the virtual environment on first use, and updates it when the project changes.
#
# Afterwards $venv/bin has nxtrain and its tools. NXTRAIN_TORCH=VERSION installs another torch, without torch-xla, in a
# separate environment. `setup nxd` creates an environment with the imports of NeuronX Distributed. PYTHON=PATH selects
# another Python.

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 5; }

NEEDED_GB=9  # torch's CUDA libraries, and their downloads
# Reference implementation in tests of preference training. Not an extra: Python 3.10 has no package of it, and NeuronX
# Distributed needs an older transformers.
TRL="trl>=1.16,<1.17;python_version>='3.11'"
NEVER_US=1000000000  # time that stands for a Python that cannot create environments

# Print the first suitable Python, or another Python that takes a fifth less time. A Python built without profile guided
# optimization, as by pyenv's default, takes half as long again, and tracing, imports and tests are mostly Python.
find_python() {
    local candidate took_us chosen="" chosen_us="" seen=""
    while read -r candidate; do
        if ! "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
            seen="$seen $candidate ($("$candidate" -V 2>&1 || true))"
        elif [ -z "$chosen" ]; then
            chosen=$candidate chosen_us=$(python_us "$candidate" || echo $NEVER_US)
        elif took_us=$(python_us "$candidate") && [ $((5 * took_us)) -lt $((4 * chosen_us)) ]; then
            chosen=$candidate chosen_us=$took_us
        fi
    done < <(candidates)
    [ -n "$chosen" ] ||
        die "the extra xla, which tests need, is for Python 3.10 to 3.13; found:${seen:- none}. Install one, or name it: PYTHON=/path/to/python3.12"
    echo "$chosen"
}

candidates() {
    local name
    if [ -n "${PYTHON:-}" ]; then type -P "$PYTHON" || true && return; fi
    for name in python3 python3.13 python3.12 python3.11 python3.10; do type -aP "$name" || true; done
}

# Print the microseconds of a loop of calls in a Python that can make environments and has the headers that torch's
# compiler needs; fail for another.
python_us() {
    "$1" - 2>/dev/null <<'END'
import ensurepip, os, sys, sysconfig, time

if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit(1)


class Table:
    def __init__(self):
        self.rows = {}

    def add(self, key, **row):
        self.rows[key] = row
        return len(self.rows)


def turn_s():
    begin, table = time.process_time(), Table()
    for number in range(20_000):
        table.add(number % 100, number=number)
    return time.process_time() - begin


print(round(1e6 * min(turn_s() for _ in range(40))))
END
}

# Fingerprint of the inputs of the environment; an environment with the same fingerprint is used without an update.
fingerprint() { printf '%s|' "$PWD" "$packages" "$(cksum <pyproject.toml)" "$("$venv/bin/python" -V 2>&1)"; }

is_ready() {
    [ "$(cat "$venv/nxtrain-setup" 2>/dev/null)" = "$(fingerprint)" ] &&
        { [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -V 2>&1)" = "$("$venv/bin/python" -V 2>&1)" ]; }
}

# uv ignores pip's environment variables, which users and mirrors set.
pass_pip_settings_to_uv() {
    export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-${PIP_DEFAULT_TIMEOUT:-120}}"
    [ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
    [ -z "${PIP_EXTRA_INDEX_URL:-}" ] || export UV_INDEX="${UV_INDEX:-$PIP_EXTRA_INDEX_URL}"
    [ -z "${PIP_FIND_LINKS:-}" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS// /,}}"
    [ -z "${PIP_CERT:-}" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"
}

make_venv() {
    local python free_gb
    python=$(find_python)
    say "with $python, $("$python" -V 2>&1)"
    free_gb=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1000000))
    compgen -G "$venv/lib/python*/site-packages/torch/__init__.py" >/dev/null || [ "$free_gb" -ge "$NEEDED_GB" ] ||
        die "$free_gb GB free in $PWD; installing torch takes $NEEDED_GB GB. Free some, or work on another disk"
    rm -f "$venv/nxtrain-setup"
    # An environment of another Python, or in a folder that was moved, cannot be updated.
    [ "$("$python" -V 2>&1)" = "$("$venv/bin/python" -V 2>&1)" ] && grep -q "$PWD/$venv" "$venv/bin/activate" ||
        rm -rf "$venv"
    "$python" -m venv "$venv" ||
        die "$python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"
}

install_packages() {
    local requirements
    read -ra requirements <<<"$packages"
    # Compiled at once: where PYTHONDONTWRITEBYTECODE is set, each process would compile torch anew, for seconds.
    if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv; then
        (pass_pip_settings_to_uv
         "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" -e "${requirements[@]}") && return
        say "uv could not install the packages; trying pip"
    fi
    "$venv/bin/python" -m pip install -e "${requirements[@]}"
}

setup() {
    if [ "${1:-}" = nxd ]; then
        venv=".venv-nxd" packages=".[xla,nxd,dev]"
    elif [ -n "${NXTRAIN_TORCH:-}" ]; then
        venv=".venv-torch-$NXTRAIN_TORCH" packages=".[dev] torch==$NXTRAIN_TORCH $TRL"
    else
        venv=".venv" packages=".[xla,dev] $TRL"
    fi
    is_ready && return
    if command -v flock >/dev/null; then exec 9<pyproject.toml && flock 9; fi  # another script may be updating it
    is_ready || create
    exec 9<&-
}

create() {
    say "setting up $venv, once: torch and its libraries are several GB, which take minutes"
    make_venv
    install_packages || die "the packages could not be installed; the lines above say why. Run the script again to go on"
    mkdir -p build/typing
    ln -sfn ../../models build/typing/nxtrain_models  # static tools cannot follow the package-dir mapping
    fingerprint >"$venv/nxtrain-setup"
}
