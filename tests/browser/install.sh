#!/usr/bin/env bash
# Chromium for the tests of the page, where the system's packages can be installed: as root on Debian.
# Elsewhere those tests skip, and say why.
set -euo pipefail
if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "No Chromium, and not root on Debian: the tests of the page will skip."
  exit 0
fi
echo "Installing Chromium for the tests of the page ..."
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium
