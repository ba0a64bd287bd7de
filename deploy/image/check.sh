#!/bin/sh
# Runs an image that is built, and checks that it serves.
#
#   ENGINE=docker deploy/image/check.sh [IMAGE=srm]
#
# ENGINE is docker or podman. The container is hardened, has a random port of this machine, and is removed at the end.
set -eu
engine=${ENGINE:-docker}
image=${1:-srm}
name=srm-check-$$
ready_s=120

fail() {
  echo "$image: $1" >&2
  "$engine" logs "$name" >&2 || true
  exit 1
}

trap '"$engine" rm --force --volumes "$name" >/dev/null 2>&1 || true' EXIT
"$engine" run --detach --name "$name" --publish 127.0.0.1::8000 --read-only --tmpfs /tmp --cap-drop all \
  --security-opt no-new-privileges --shm-size 64k "$image" >/dev/null
url=http://$("$engine" port "$name" 8000 | head -n 1)

started=$(date +%s)
until curl -sf "$url/ready" >/dev/null; do
  [ "$("$engine" inspect --format '{{.State.Running}}' "$name")" = true ] || fail "the server has ended"
  [ $(($(date +%s) - started)) -lt "$ready_s" ] || fail "the server is not ready after $ready_s s"
  sleep 0.2
done

question='Question: Ava has 6 boxes with 7 pears each. How many pears is that in all?\nAnswer:'
reply=$(curl -sf "$url/v1/completions" -H 'Content-Type: application/json' \
  -d "{\"prompt\": \"$question\", \"max_tokens\": 64, \"temperature\": 0}") || fail "a completion is refused"
case $reply in
  *'#### 42'*) ;;
  *) fail "the completion is wrong: $reply" ;;
esac

curl -sf "$url/metrics" | grep -q '^srm_' || fail "/metrics has no metric of srm"
label=$("$engine" inspect --format '{{index .Config.Labels "org.opencontainers.image.version"}}' "$name")
[ "$("$engine" exec "$name" srm --version)" = "srm $label" ] || fail "the label says version $label"
[ "$("$engine" exec "$name" id -u)" != 0 ] || fail "the server's user is root"
case $("$engine" logs "$name" 2>&1) in
  *compiling*) fail "a graph was compiled that should be in the image" ;;
esac

"$engine" stop --time 120 "$name" >/dev/null
code=$("$engine" inspect --format '{{.State.ExitCode}}' "$name")
[ "$code" = 0 ] || fail "exit code $code after SIGTERM"
echo "$image: ok"
