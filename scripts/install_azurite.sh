#!/usr/bin/env bash
# Installs npm's azurite, Microsoft's test server for Azure Blob Storage, into build/azurite. Does nothing if azurite is
# already installed.
#
#   bash scripts/install_azurite.sh
#
# The exit code is 0 if azurite is installed, and 5 if it cannot be installed.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$root/build/azurite"

[ -x "$folder/node_modules/.bin/azurite-blob" ] && exit
if ! command -v npm >/dev/null; then
    echo "error: azurite needs Node.js with npm" >&2
    exit 5
fi
# An interrupted installation must not have the name that tests look for.
draft="$folder.draft"
rm -rf "$draft"
if ! timeout 240 npm install --silent --no-audit --no-fund --prefix "$draft" 'azurite@^3.33' </dev/null >&2; then
    echo "error: azurite could not be installed; the lines above say why" >&2
    exit 5
fi
rm -rf "$folder" && mv "$draft" "$folder"
