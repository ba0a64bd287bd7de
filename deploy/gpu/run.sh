#!/usr/bin/env bash
# On the GPU machine: unpacks the archives beside it and runs the commands of call-CALL.txt.
#
#   run.sh CALL RESULTS [gpu [ONLY]]
#
# ONLY is a regular expression: only commands whose names begin so are run.
# RESULTS gets call-CALL.jsonl, a line for each command as soon as it has ended, and NAME/log.
# KIT_PLACE=FOLDER says where to unpack, to be found there by the next call with the same archives.
# PYTHON=PROGRAM is tried first, if it is of the kit's version. See README.md.
set -euo pipefail
began=$(date +%s)
here=$(realpath "$(dirname "$0")")
call=${1:?usage: run.sh CALL RESULTS [gpu [ONLY]]}
results=$(realpath -m "${2:?where to write what is measured}")

# Says why nothing runs, in RESULTS too, whose disk may be full.
refuse() {
  echo "run.sh: $1" >&2
  line=$(tr -d '"\\' <<<"${1%%$'\n'*}" | tr '[:cntrl:]' ' ')
  mkdir -p "$results" &&
    # On a line of its own, whatever the call before left behind.
    printf '\n{"name": "unpack", "at": %s, "exit": 2, "last": "%s"}\n' "$began" "$line" \
      >>"$results/call-$call.jsonl" || true
  exit 2
}

runtime=$(basename "$here"/max-*-python-*.tar.xz .tar.xz)
version=${runtime##*-python-}
python=
for program in "${PYTHON:-}" "python$version" python3; do
  says="$("$program" -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null || true)"
  if test "${says%% *}" = "$version"; then
    python=${says#* }
    break
  fi
done
test "$python" || refuse "no Python $version here, which the kit is packed for: PYTHON=PROGRAM names one, else pack with --python-version"

place=${KIT_PLACE:-$(mktemp -d)}
kit=$(cat "$here"/*.tar.xz | sha256sum)
place=$place/${kit:0:12} # another kit's files are not mixed with these
umask 022 # the engine reads no graph where others may write
mkdir -p "$place" || refuse "cannot make $place"
place=$(realpath "$place")
unpacked=$place/unpacked
if ! test -f "$unpacked"; then
  for archive in "$here"/*.tar.xz; do
    # Not behind || or in {}: bash ignores there what fails before the last command.
    if ! said=$(tar --no-same-owner -xJf "$archive" -C "$place" 2>&1); then
      refuse "$archive cannot be unpacked into $place: $said"
    fi
  done
  touch "$unpacked"
fi
cd "$place/source"
export PYTHONPATH=$place/site${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
export SRM_CACHE_DIR=$place/graphs
exec "$python" -m deploy.gpu.run "deploy/gpu/call-$call.txt" "$results" --began "$began" ${4:+"--only=$4"}
