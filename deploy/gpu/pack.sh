#!/usr/bin/env bash
# Packs what a GPU machine needs that reaches no package registry and has no MAX: the part of MAX that
# runs compiled graphs, the graphs, and this source tree.
#
#   deploy/gpu/pack.sh [OUT=build/gpu-kit] [DEVICE=gpu] [PYTHON_VERSION=3.12]
#
# writes OUT/kit.tar.xz.00, .01, …, pieces of 30 MiB that can travel apart. PYTHON_VERSION is the other
# machine's. DEVICE=cpu packs graphs for processors of this machine's model, to rehearse without a GPU.
# See README.md beside this file.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-build/gpu-kit} device=${2:-gpu} python_version=${3:-3.12}
python=${BIN:-.venv/bin}/python
if test -n "$(git status --porcelain --untracked-files=no)"; then
  echo "Commit your changes first: the kit holds the source tree of HEAD, and its graphs must be of that."
  exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/kit/source" "$work/kit/graphs" "$work/all"

echo "1/4 graphs for the $device, into $out/graphs (some minutes each; those there are kept)"
$python -m deploy.gpu.graphs --device "$device" --output "$out/graphs"
$python -m engine.device.graph_notes prune "$out/graphs"
cp "$out"/graphs/*.mef "$out"/graphs/*.json "$work/kit/graphs/"
if test "$(ls "$out"/graphs/*.mef | wc -l)" -lt "$($python -c 'from deploy.gpu.graphs import GRAPHS; print(len(GRAPHS))')"; then
  echo "A graph is missing that was compiled by older code without a note: delete $out/graphs and pack again."
  exit 1
fi

echo "2/4 MAX's runtime for Python $python_version"
platforms=()
for minor in 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
# pip replaces a folder that two packages share, so each gets a folder of its own first.
fetch() {
  for name in "$@"; do
    pinned=$(grep -ihE "^${name//_/[-_]}==" requirements.lock requirements-dev.lock | head -n 1 | cut -d ' ' -f 1)
    echo "  $name: ${pinned:-newest}"
    $python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --no-compile --only-binary=:all: \
      --implementation cp --python-version "$python_version" "${platforms[@]}" \
      --target "$work/one" "${pinned:-$name}"
    cp -r "$work/one/." "$work/all/"
    rm -rf "$work/one"
  done
}
fetch max max-core max-shmem-libs mojo-compiler
fetch msgspec exceptiongroup taskgroup typing_extensions psutil safetensors prometheus_client
fetch tokenizers pytest pluggy iniconfig packaging Pygments
site=$work/kit/site
mkdir -p "$site/modular/lib" "$site/modular/bin"
# No compiler, linker or debugger. The SDK's root is found by the file bin/mojo, which is never run.
install -m 755 /dev/null "$site/modular/bin/mojo"
for library in libmax libMGPRT libNVPTX libAsyncRTMojoBindings libAsyncRTRuntimeGlobals \
  libKGENCompilerRTShared libMSupportGlobals libmax_profiler_shim libnixl; do
  cp "$work/all/modular/lib/$library.so" "$site/modular/lib/"
done
rm -rf "$work"/all/{modular,bin} "$work"/all/max/{pipelines,serve,benchmark,_entrypoints}
cp -r "$work"/all/* "$site/"

echo "3/4 source tree at $(git rev-parse --short HEAD)"
git archive HEAD -- . ':!docs/*.png' ':!docs/benchmarks/*.svg' ':!models/demo/*.svg' | tar -x -C "$work/kit/source"
git rev-parse --short HEAD >"$work/kit/source/COMMIT"

echo "4/4 compressing"
find "$work/kit" -name __pycache__ -prune -exec rm -rf {} +
rm -f "$out"/kit.tar.xz.*
tar -C "$work" --sort=name -cf - kit \
  | xz --threads=1 --x86 --lzma2=preset="${XZ_PRESET:-9e}",dict=256MiB | split -b 30M -d - "$out/kit.tar.xz."
cp deploy/gpu/run.sh "$out/"
du -ch "$work"/kit/* | tail -n 5
ls -l "$out"/kit.tar.xz.*
