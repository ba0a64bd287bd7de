#!/usr/bin/env bash
# Programs that some tests run: Chromium, nginx, promtool and cc, where the system's packages can be
# installed: as root on Debian. Elsewhere those tests skip, and say why; without cc they fail.
set -euo pipefail
packages=()
command -v chromium google-chrome >/dev/null || packages+=(chromium)
command -v nginx /usr/sbin/nginx >/dev/null || packages+=(nginx-light)
command -v promtool >/dev/null || packages+=(prometheus)
command -v cc >/dev/null || packages+=(gcc libc6-dev)
if [ ${#packages[@]} = 0 ]; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "Not root on Debian: tests that need one of ${packages[*]} will skip or fail."
  exit 0
fi
echo "Installing ${packages[*]} for the tests ..."
if [ ! -e /usr/sbin/policy-rc.d ]; then  # or they would be started, as services
  trap 'rm /usr/sbin/policy-rc.d' EXIT
  printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
  chmod +x /usr/sbin/policy-rc.d
fi
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${packages[@]}"
