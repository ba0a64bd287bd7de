#!/bin/sh
# What the check of the image runs, on Debian as root: builders and runners of containers, and in the virtual
# environment VENV podman-compose.
#
#   deploy/image/install.sh VENV
set -eu
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
  aardvark-dns buildah containernetworking-plugins debootstrap fuse-overlayfs iptables netavark podman runc uidmap
python3 -m venv "$1"
"$1/bin/pip" install --quiet podman-compose
