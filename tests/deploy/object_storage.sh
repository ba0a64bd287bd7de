#!/usr/bin/env bash
# `srm batch` with objects of S3 and Google Cloud Storage, against servers that are packages, on this machine.
# What they need lies in .venv-storage, beside what .venv has already.
set -euo pipefail
cd "$(dirname "$0")/../.."
if ! cmp -s requirements/storage.lock .venv-storage/installed; then
  rm -rf .venv-storage
  .venv/bin/pip install --quiet --no-deps --require-hashes --target .venv-storage -r requirements/storage.lock
  cp requirements/storage.lock .venv-storage/installed
fi
export PYTHONPATH=$PWD/.venv-storage
.venv/bin/python -c 'import s3fs, gcsfs, moto.server, gcp_storage_emulator'  # or the tests would be skipped
.venv/bin/python -m pytest tests/integration/batches/test_object_storage.py
