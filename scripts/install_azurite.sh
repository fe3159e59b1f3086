#!/usr/bin/env bash
# Installs npm's azurite, Microsoft's server of Azure Blob Storage for tests, into build/azurite. Does nothing where it
# is there.
#
#   bash scripts/install_azurite.sh
#
# Exit code 0 when it is there, 5 when it cannot be installed.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$root/build/azurite"

[ -x "$folder/node_modules/.bin/azurite-blob" ] && exit
if ! command -v npm >/dev/null; then
    echo "error: azurite needs Node.js with npm" >&2
    exit 5
fi
# A half-finished installation has no name that tests look for.
draft="$folder.draft"
rm -rf "$draft"
if ! timeout 240 npm install --silent --no-audit --no-fund --prefix "$draft" 'azurite@^3.33' </dev/null >&2; then
    echo "error: azurite could not be installed; the lines above say why" >&2
    exit 5
fi
rm -rf "$folder" && mv "$draft" "$folder"
