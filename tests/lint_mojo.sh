#!/bin/sh
# usage: lint_mojo.sh BIN FOLDER - fails if `mojo format` would change a file of FOLDER or if a
# public name of its packages lacks a doc string. `mojo format` has no --check: format a copy.
set -eu
bin=$1 folder=$2
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$folder/." "$copy"
"$bin/mojo" format --quiet "$copy"
diff -r "$folder" "$copy" || { echo "run: make fmt" >&2; exit 1; }
"$bin/mojo" doc --diagnose-missing-doc-strings -Werror -o /dev/null "$folder/srm"
