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
python=.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/kit/source"

echo "1/4 graphs for the $device, into $out/graphs (a minute or more each; those there are kept)"
$python -m deploy.gpu.graphs --device "$device" --output "$out/graphs"

echo "2/4 MAX's runtime for Python $python_version"
platforms=()
for minor in 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
# pip replaces a folder that two packages share, so each gets a folder of its own first.
fetch() {
  for name in "$@"; do
    pinned=$(grep -ihE "^$name==" requirements.lock requirements-dev.lock | head -n 1 | cut -d ' ' -f 1)
    $python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary=:all: \
      --implementation cp --python-version "$python_version" "${platforms[@]}" \
      --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --target "$work/one" "${pinned:-$name}"
    cp -r "$work/one/." "$work/all/"
    rm -rf "$work/one"
  done
}
mkdir "$work/all"
fetch max max-core max-shmem-libs mojo-compiler
fetch msgspec exceptiongroup taskgroup typing_extensions psutil safetensors prometheus_client
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
test -z "$(git status --porcelain --untracked-files=no)" || echo "warning: changes that are not committed stay behind"
git archive HEAD | tar -x -C "$work/kit/source"
git rev-parse --short HEAD >"$work/kit/source/COMMIT"
cp -r "$out/graphs" "$work/kit/graphs"

echo "4/4 compressing"
find "$work/kit" -name __pycache__ -prune -exec rm -rf {} +
rm -f "$out"/kit.tar.xz.*
tar -C "$work" -cf - kit | xz -T0 -7 | split -b 30M -d - "$out/kit.tar.xz."
ls -l "$out"/kit.tar.xz.*
