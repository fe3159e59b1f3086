# Sourced by the other scripts. Makes the virtual environment on first use, and mends it when the project has changed.
#
# Afterwards $venv/bin holds nxtrain and its tools. NXTRAIN_TORCH=VERSION asks for another torch, without torch-xla, in
# an environment of its own; `setup nxd` for one with what NeuronX Distributed imports; PYTHON=PATH for another Python.

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 5; }

NEEDED_GB=9  # torch's CUDA libraries, and the downloads beside them

# Print the first Python that suits.
find_python() {
    local candidate seen=""
    for candidate in ${PYTHON:+"$PYTHON"} $([ -n "${PYTHON:-}" ] || echo python3 python3.13 python3.12 python3.11 python3.10); do
        command -v "$candidate" >/dev/null || continue
        "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' && command -v "$candidate" && return
        seen="$seen $candidate ($("$candidate" -V 2>&1))"
    done
    die "the extra xla, which tests need, is for Python 3.10 to 3.13; found:${seen:- none}. Install one, or name it: PYTHON=/path/to/python3.12"
}

# What the environment must have been made from to be used as it is.
fingerprint() { printf '%s|' "$PWD" "$packages" "$(cksum <pyproject.toml)" "$("$venv/bin/python" -V 2>&1)"; }

is_ready() {
    [ "$(cat "$venv/nxtrain-setup" 2>/dev/null)" = "$(fingerprint)" ] &&
        { [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -V 2>&1)" = "$("$venv/bin/python" -V 2>&1)" ]; }
}

# uv reads none of pip's variables; people and mirrors set pip's.
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
    free_gb=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1000000))
    compgen -G "$venv/lib/python*/site-packages/torch/__init__.py" >/dev/null || [ "$free_gb" -ge "$NEEDED_GB" ] ||
        die "$free_gb GB free in $PWD; installing torch takes $NEEDED_GB GB. Free some, or work on another disk"
    rm -f "$venv/nxtrain-setup"
    # Neither another Python's packages nor the paths of a folder that has moved can be mended.
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
        venv=".venv-torch-$NXTRAIN_TORCH" packages=".[dev] torch==$NXTRAIN_TORCH"
    else
        venv=".venv" packages=".[xla,dev]"
    fi
    is_ready && return
    if command -v flock >/dev/null; then exec 9<pyproject.toml && flock 9; fi  # another script may be at it
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
