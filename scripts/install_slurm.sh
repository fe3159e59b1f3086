#!/usr/bin/env bash
# Installs Debian's Slurm, as root, in seconds. Some tests start it on this machine. Does nothing if installed.
#
#   bash scripts/install_slurm.sh
#
# The exit code is 0 if Slurm is installed, and 5 if it cannot be installed.
set -euo pipefail
packages=(slurmctld slurmd slurm-client munge)
export PATH="$PATH:/usr/sbin" DEBIAN_FRONTEND=noninteractive

say() { printf '%s\n' "$*" >&2; }
is_there() { type slurmctld slurmd sbatch munged >/dev/null 2>&1; }
install() {
    timeout 25 apt-get -qq update && timeout 50 apt-get -qq install --yes --no-install-recommends "${packages[@]}"
}

is_there && exit
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "error: ${packages[*]} are missing, and only root installs them, on Debian and Ubuntu"
    exit 5
fi
if ! said=$(install 2>&1 </dev/null) || ! is_there; then
    say "$said"
    say "error: ${packages[*]} could not be installed; the lines above say why"
    exit 5
fi
