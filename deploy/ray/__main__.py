"""`python -m deploy.ray INPUT -o FOLDER`: `srm batch` over a Ray cluster."""

from __future__ import annotations

import sys

from srm.errors import ConfigError, SRMError

try:
    from deploy.ray.batch import main
except ModuleNotFoundError as missing:
    print(f"deploy.ray: {missing}: pip install 'ray[data,serve]' pyarrow", file=sys.stderr)
    sys.exit(ConfigError.exit_code)

if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except SRMError as error:
        print(f"deploy.ray: {error.message}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
