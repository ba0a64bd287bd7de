"""`python -m deploy.kubernetes.check`: all that can be said of the manifests without a cluster.

Each overlay is made by `kubectl kustomize`; its objects must fit the schemas of Kubernetes in
strict mode, and settings of srm in them must exist; the alerts must pass promtool's check and
tests.
Custom kinds are listed as not validated, unless `--models` says where npm installed their schemas.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from deploy.kubernetes.manifests import ALERTS, OVERLAYS, RULES, alerts, rendered
from deploy.kubernetes.schemas import custom_problems, is_built_in, problems
from deploy.kubernetes.settings import settings_problems
from srm.loadtest.records import ROOT
from srm.settings import load

RULE_TESTS = ROOT / "tests" / "deploy" / "alerts.yml"


class CheckConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the check."""

    write: bool = False
    """Write the alerts of base/ from those of Prometheus, and check nothing."""
    models: str = ""
    """Folder where npm installed the schemas of custom kinds; empty: they are not validated."""


def sources() -> Iterator[str]:
    """Yield what is wrong with the alerts and their tests."""
    if ALERTS.read_text() != alerts():
        yield f"{ALERTS} is not as {RULES}: python -m deploy.kubernetes.check --write"
    for arguments in (("check", "rules", RULES), ("test", "rules", RULE_TESTS)):
        done = subprocess.run(
            ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            yield f"promtool {arguments[0]} rules: {done.stdout}{done.stderr}"


def main(argv: list[str]) -> int:
    """Check, and print what is wrong and what was not validated; return 1 if anything is wrong."""
    config = load(CheckConfig, argv, prog="python -m deploy.kubernetes.check")
    if config.write:
        ALERTS.write_text(alerts())
        return 0
    objects_by_source = list(sources())
    left_out: set[str] = set()
    for overlay in OVERLAYS:
        objects = rendered(overlay)
        results = [*problems(objects), *settings_problems(objects)]
        if config.models:
            results += custom_problems(objects, Path(config.models))
        else:
            left_out |= {object_["kind"] for object_ in objects if not is_built_in(object_)}
        objects_by_source += [f"{overlay.name}: {problem}" for problem in results]
        sys.stdout.write(f"{overlay.name}: {len(objects)} objects\n")
    sys.stdout.writelines(
        f"not validated, for want of --models: {kind}\n" for kind in sorted(left_out)
    )
    sys.stdout.writelines(f"{problem}\n" for problem in objects_by_source)
    return 1 if objects_by_source else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
