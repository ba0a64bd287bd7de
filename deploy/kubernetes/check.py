"""`python -m deploy.kubernetes.check`: all that can be said of the manifests without a cluster.

Each overlay is made by `kubectl kustomize`; its objects must fit the schemas of Kubernetes in strict
mode and those of the CustomResourceDefinitions in `--crds`, and pass `deploy.kubernetes.lint`; the
alerts must pass promtool's check and tests. Custom kinds without a schema are listed as not
validated.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml

from deploy.kubernetes.lint import lint, objects_of
from deploy.kubernetes.manifests import (
    ALERTS,
    HERE,
    OVERLAYS,
    RULES,
    alerts,
    metric_names,
    rendered,
)
from deploy.kubernetes.schemas import Kind, custom_schemas, is_built_in, kind_of, problems
from engine.records import ROOT
from engine.settings import load

RULE_TESTS = ROOT / "tests" / "deploy" / "alerts.yml"


class CheckConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the check."""

    write: bool = False
    """Write the alerts of base/ from those of Prometheus, and check nothing."""
    crds: str = ""
    """Folder of YAML files with CustomResourceDefinitions; empty: custom kinds are not validated."""


def sources() -> Iterator[str]:
    """Yield what is wrong with the files themselves: keys given twice, alerts, their tests."""
    for path in sorted(HERE.rglob("*.yml")):
        try:
            objects_of(path.read_text())
        except yaml.YAMLError as error:
            yield f"{path}: {error}"
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
    custom = custom_schemas(Path(config.crds)) if config.crds else {}
    found, metrics = list(sources()), metric_names()
    left_out: set[Kind] = set()
    for overlay in OVERLAYS:
        objects = rendered(overlay)
        said = (*problems(objects, custom), *lint(objects, metrics))
        found += [f"{overlay.name}: {problem}" for problem in said]
        left_out |= {kind_of(one) for one in objects if not is_built_in(one)} - custom.keys()
        sys.stdout.write(f"{overlay.name}: {len(objects)} objects\n")
    sys.stdout.writelines(
        f"not validated, for want of a schema: {kind} of {version}\n"
        for version, kind in sorted(left_out)
    )
    sys.stdout.writelines(f"{problem}\n" for problem in found)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
