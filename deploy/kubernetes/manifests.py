"""The manifests as kustomize makes them, and the alerts that are made from Prometheus' own file."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
HERE = Path(__file__).parent
RULES = HERE.parent / "prometheus" / "alerts.yml"
ALERTS = HERE / "base" / "alerts.yml"
OVERLAYS = sorted(path.parent for path in HERE.glob("overlays/*/kustomization.yml"))
_HEAD = "# Made from deploy/prometheus/alerts.yml by python -m deploy.kubernetes.check --write\n"


def rendered(overlay: Path) -> list[Object]:
    """Return the objects of an overlay. Raises CalledProcessError if kustomize refuses it."""
    made = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], stdout=subprocess.PIPE, text=True, check=True
    )
    return objects_of(made.stdout)


def objects_of(text: str) -> list[Object]:
    """Return the objects of a YAML text."""
    return [object_ for object_ in yaml.safe_load_all(text) if object_]


def title_of(object_: Object) -> str:
    """Return kind and name."""
    return f"{object_['kind']}/{object_['metadata']['name']}"


def alerts() -> str:
    """Return the PrometheusRule of Prometheus' alerts, as YAML."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "srm", "labels": {"app.kubernetes.io/name": "srm"}},
        "spec": yaml.safe_load(RULES.read_text()),
    }
    text: str = yaml.safe_dump(rule, sort_keys=False, width=100)
    return _HEAD + text
