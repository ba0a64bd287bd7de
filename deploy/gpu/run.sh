#!/usr/bin/env bash
# On the GPU machine: unpacks a kit, checks every kernel and the model, measures, writes records.
#
#   run.sh KIT_FOLDER RESULTS_FOLDER [DEVICE=gpu]
#
# KIT_FOLDER has the pieces that pack.sh wrote. Every part has a log and a time limit of its own, and one
# that fails does not stop the next; the exit status counts those that failed. RESULTS_FOLDER gets
# summary.txt and results.tar.gz with all logs and records, written anew after every part. Variables:
#   PARTS="kernels scores"   these parts alone
#   LIMIT_S=300              most seconds of a part
#   TOTAL_S=580              most seconds in all; what finds no time is named in the summary
#   KIT_PLACE=FOLDER         where to unpack, to be found there by a later run
set -uo pipefail
kit=$(realpath "${1:?usage: run.sh KIT_FOLDER RESULTS_FOLDER [DEVICE]}") || exit 100
results=${2:?where to write the records} device=${3:-gpu}
mkdir -p "$results" && results=$(realpath "$results") || exit 100
place=${KIT_PLACE:-$(mktemp -d)}
work=$place/results
mkdir -p "$work"
say() { echo "$*" | tee -a "$work/summary.txt"; }
if ! test -f "$place/unpacked"; then
  cat "$kit"/kit.tar.xz.* | tar -xJ -C "$place" || exit 100
  touch "$place/unpacked"
  say "unpacked after $SECONDS s"
fi
cd "$place/kit/source" || exit 100
export PYTHONPATH=$place/kit/site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 # others' plugins may not even import there
export SRM_CACHE_DIR=$place/kit/graphs SRM_DEVICE=$device SRM_DTYPE=bfloat16 SRM_DTYPES=bfloat16
has_torch=$(python3 -c 'import importlib.util as u; print(int(u.find_spec("torch") is not None))')
failed=0

keep() {
  cp "$work/summary.txt" "$results/"
  tar -C "$work" -czf "$results/results.tar.gz" .
}

# part NAME COMMAND…: run it; its log is NAME.log, its records go to the folder NAME.
part() {
  local name=$1 started=$SECONDS limit=${LIMIT_S:-300} status
  shift
  case " ${PARTS:-$name} " in *" $name "*) ;; *) return ;; esac
  local left=$((${TOTAL_S:-580} - SECONDS))
  if ((left < 20)); then
    say "$name: left out, no time"
    failed=$((failed + 1))
    return
  fi
  timeout -k 10 "$((left < limit ? left : limit))" "$@" >"$work/$name.log" 2>&1
  status=$?
  ((status == 0)) || failed=$((failed + 1))
  say "$name: exit $status after $((SECONDS - started)) s; $(grep -v '^ *$' "$work/$name.log" | tail -n 1 | cut -c 1-200)"
  keep
}

# with_torch NAME COMMAND…: a part that nothing can stand for where torch is missing.
with_torch() {
  if ((has_torch)); then part "$@"; else say "$1: skipped, torch is not installed"; fi
}

tests() {
  local folder=$1 marker="gpu and not slow"
  shift
  test "$device" = gpu || marker="not gpu and not slow"
  echo python3 -m pytest -q -c deploy/gpu/pytest.ini --rootdir=. -p no:cacheprovider \
    --confcutdir="$folder" "-m" "'$marker'" "$@"
}

bench() {
  local name=$1
  shift
  echo python3 srm.py bench "$@" --output "$work/$name" --repetitions "${REPETITIONS:-3}"
}

((has_torch)) || say "torch is not installed: its rates will be missing from the records"
part adopt python3 -m engine.device.graph_notes adopt "$SRM_CACHE_DIR" "$device"
if test "$device" = gpu; then part gpu nvidia-smi; fi

# Is it right?
part kernels bash -c "$(tests tests/kernels tests/kernels/test_{embedding,mixer,taps,edits,sampler,score}.py)"
part scores bash -c "$(tests tests/conformance tests/conformance/test_device.py)"
part edits bash -c "$(tests tests/conformance tests/conformance/test_edited_logits.py -k "'not float32'")"
part invariance bash -c "$(tests tests/conformance tests/conformance/test_invariance.py)"

# How fast is it? Smaller steps first: a larger one may find no memory.
with_torch peaks python3 -m bench.model.gpu_peak
if test "$device" = gpu; then
  small=1024,4096,16384,65536 large=262144,1048576 turns=65536 many=1048576 prompts=65536
else
  small=4,64 large=128 turns=1024 many=4096 prompts=1024
fi
engine="engine --demo-model absent --cold-start false --top-p 0.9"
for width in 512 1024; do
  part "steps-$width" $(bench "steps-$width" $engine --random-widths $width --batch-sizes $small)
done
for width in 512 1024; do
  part "large-$width" $(bench "large-$width" $engine --random-widths $width --batch-sizes $large --pytorch false)
  part "memory-$width" $(bench "memory-$width" $engine --random-widths $width --batch-sizes $many \
    --turn-rows $turns --fill-memory true --pytorch false)
done
part prefill $(bench prefill prefill --demo-model absent --step-tokens $prompts --prompt-lengths 1,16,256,512)
say "$failed parts failed; $SECONDS s"
keep
exit "$failed"
