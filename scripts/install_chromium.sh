#!/usr/bin/env bash
# Installs Debian's Chromium, as root. Some tests render the page of `nxtrain report` in it. Does nothing if installed.
#
#   bash scripts/install_chromium.sh
#
# The exit code is 0 if Chromium is installed, and 5 if it cannot be installed.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

is_there() { type chromium >/dev/null 2>&1; }
install() { timeout 60 apt-get -qq update && timeout 240 apt-get -qq install --yes --no-install-recommends chromium fonts-dejavu-core; }

is_there && exit
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: chromium is missing, and only root installs it, on Debian and Ubuntu" >&2
    exit 5
fi
if ! said=$(install 2>&1 </dev/null) || ! is_there; then
    printf '%s\n' "$said" "error: chromium could not be installed; the lines above say why" >&2
    exit 5
fi
