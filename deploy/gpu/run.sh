#!/usr/bin/env bash
# On the GPU machine: unpacks a kit, checks every kernel and the model, measures, writes records.
#
#   run.sh KIT_FOLDER RESULTS_FOLDER [DEVICE=gpu]
#
# KIT_FOLDER has the pieces that pack.sh wrote. Every part has a time limit and a log of its own in
# RESULTS_FOLDER, and a part that fails does not stop the next; the exit status counts those that failed.
# PARTS="kernels model" runs some of them only; LIMIT_S is the limit of each, in seconds.
set -uo pipefail
kit=${1:?usage: run.sh KIT_FOLDER RESULTS_FOLDER [DEVICE]} results=${2:?where to write the records} device=${3:-gpu}
mkdir -p "$results" && results=$(realpath "$results")
place=${KIT_PLACE:-$(mktemp -d)}
if ! test -d "$place/kit"; then
  cat "$kit"/kit.tar.xz.* | tar -xJ -C "$place" || exit 100
fi
cd "$place/kit/source" || exit 100
export PYTHONPATH=$place/kit/site SRM_CACHE_DIR=$place/kit/graphs SRM_DEVICE=$device PYTHONUNBUFFERED=1
marker=$([[ $device == gpu ]] && echo gpu || echo "not gpu")
failed=0
part() {
  local name=$1
  shift
  case " ${PARTS:-$name} " in *" $name "*) ;; *) return ;; esac
  local started=$SECONDS
  timeout "${LIMIT_S:-400}" "$@" >"$results/$name.log" 2>&1
  local status=$?
  ((status == 0)) || failed=$((failed + 1))
  echo "$name: exit $status after $((SECONDS - started)) s; $(grep -v '^ *$' "$results/$name.log" | tail -n 1)"
}

part peaks python3 -m training.gpu_peak
part kernels python3 -m pytest -q -p no:cacheprovider tests/kernels -m "$marker" -k "not linear"
part model python3 -m pytest -q -p no:cacheprovider tests/conformance/test_invariance.py -m "$marker and not slow"
part engine python3 srm.py bench engine --output "$results" --batch-sizes 1024,4096,16384,65536,262144,1048576
part prefill python3 srm.py bench prefill --output "$results"
echo "$failed parts failed"
exit "$failed"
