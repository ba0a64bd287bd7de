#!/usr/bin/env bash
# On the GPU machine: unpacks the archives beside it and runs one call of the kit.
#
#   run.sh CALL RESULTS [DEVICE=gpu]
#
# RESULTS gets call-CALL.jsonl, a line for each result as soon as it is there, and call-CALL.log.
# KIT_PLACE=FOLDER says where to unpack, to be found there by the next call. See README.md.
set -euo pipefail
began=$(date +%s)
here=$(realpath "$(dirname "$0")")
call=${1:?usage: run.sh CALL RESULTS [DEVICE]}
results=$(realpath -m "${2:?where to write what is measured}")
device=${3:-gpu}
place=$(realpath "${KIT_PLACE:-$(mktemp -d)}")
for archive in "$here"/*.tar.xz; do
  unpacked=$place/$(basename "$archive").unpacked
  test -f "$unpacked" || { tar -xJf "$archive" -C "$place" && touch "$unpacked"; }
done
cd "$place/source"
export PYTHONPATH=$place/site PYTHONDONTWRITEBYTECODE=1
exec python3 -m deploy.gpu.run "$call" "$results" --device "$device" --began "$began" --cache-dir "$place/graphs"
