#!/bin/sh
# Makes an image to build on where no registry can be reached: Debian with its own Python, by debootstrap.
#
#   deploy/image/base.sh TAG [SUITE=trixie]
#
# Needs root, buildah and debootstrap. The mirror is the one that apt uses on this machine; the image does not name it.
set -eu
tag=$1 suite=${2:-trixie}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' | head -n 1)
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$root" "$mirror"
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED # as in the official Python images
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/var/log/*
: >"$root/etc/apt/sources.list"
: >"$root/etc/resolv.conf"
echo localhost >"$root/etc/hostname"
container=$(buildah from scratch)
buildah add -q "$container" "$root" / >/dev/null
buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --cmd python3 "$container"
buildah commit -q --rm "$container" "$tag"
