"""The manifests as kustomize makes them, and the alerts that are made from Prometheus' own file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml
from prometheus_client.metrics import MetricWrapperBase

from deploy.kubernetes.lint import Object, objects_of
from srm.engine import metrics as engine_metrics

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


def metric_names() -> set[str]:
    """Return the names of the engine's metrics, as Prometheus has them."""
    metrics = (var for var in vars(engine_metrics).values() if isinstance(var, MetricWrapperBase))
    families = [family for metric in metrics for family in metric.describe()]
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}
