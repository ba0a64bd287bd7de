"""The manifests of deploy/kubernetes are right, and the lint notices each kind of defect."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.kubernetes.lint import Object, lint, objects_of
from deploy.kubernetes.manifests import ALERTS, HERE, OVERLAYS, alerts, metric_names, rendered
from srm.server.errors import NotPermitted
from srm.server.http.cors import Origins
from srm.server.routes.health import OPERATIONS, VERSION
from tests.deploy.routers import deployed_flags
from tests.kit.serving import ROOT

CONTAINER = ("spec", "template", "spec", "containers", 0)
POD = CONTAINER[:3]
SERVER, ROUTER, SERVICE = "StatefulSet/srm", "Deployment/srm-router", "Service/srm"
KEDA = "ScaledObject/srm"
HPA, POLICY = "HorizontalPodAutoscaler/srm", "NetworkPolicy/srm"
GONE = object()
"""In place of a value: the field is not there."""


@cache
def objects(overlay: str) -> list[Object]:
    """The objects of an overlay; the test is skipped where kubectl is absent."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    return rendered(HERE / "overlays" / overlay)


def test_images_have_the_tag_of_this_version() -> None:
    texts = [path.read_text() for path in HERE.rglob("kustomization.yml")]
    tags = [tag for text in texts for tag in re.findall(r"newTag: (\S+?)}", text)]
    assert len(tags) >= 5
    assert set(tags) == {f'"{VERSION}"'}


@pytest.mark.parametrize("overlay", [path.name for path in OVERLAYS])
def test_an_overlay_has_no_defect(overlay: str) -> None:
    assert lint(objects(overlay), metric_names()) == []


@pytest.mark.parametrize(
    ("title", "path", "value", "message"),
    [
        ("PersistentVolumeClaim/srm-model", ("metadata", "name"), "other", "no claim 'srm-model'"),
        (SERVER, (*CONTAINER, "readinessProbe"), GONE, "no readinessProbe"),
        (SERVER, (*CONTAINER, "livenessProbe", "httpGet", "port"), "web", "port 'web'"),
        (ROUTER, (*CONTAINER, "resources", "requests", "cpu"), GONE, "requests has no cpu"),
        (SERVER, (*CONTAINER, "securityContext", "capabilities"), {}, "capabilities"),
        (ROUTER, (*CONTAINER, "securityContext", "readOnlyRootFilesystem"), False, "readOnly"),
        (SERVER, (*POD, "securityContext", "runAsUser"), 0, "runAsUser"),
        (SERVER, (*POD, "enableServiceLinks"), GONE, "enableServiceLinks"),
        (SERVICE, ("spec", "selector"), {"app": "srm"}, "matches no pods"),
        (SERVICE, ("spec", "ports", 0, "targetPort"), "web", "targetPort = 'web'"),
        ("PodDisruptionBudget/srm", ("spec", "selector", "matchLabels"), {"a": "b"}, "no pods"),
        ("ServiceMonitor/srm", ("spec", "endpoints", 0, "port"), "http2", "port = 'http2'"),
        ("ServiceMonitor/srm", ("spec", "selector", "matchLabels"), {"a": "b"}, "0 Services"),
        ("NetworkPolicy/default-deny", ("spec", "policyTypes"), ["Ingress"], "denies all"),
        (POLICY, ("spec", "ingress", 0, "ports", 0, "port"), "web", "port 'web'"),
        (POLICY, ("spec", "podSelector", "matchLabels"), {"app": "srm"}, "matches no pods"),
        ("NetworkPolicy/srm-router", ("spec", "egress", 0, "ports", 0, "port"), "web", "'web'"),
        (SERVER, ("spec", "serviceName"), "srm", "clusterIP: None"),
        (ROUTER, (*POD, "serviceAccountName"), "default", "no ServiceAccount"),
        ("RoleBinding/srm-router", ("subjects", 0, "name"), "other", "no ServiceAccount 'other'"),
        (
            SERVER,
            (*CONTAINER, "env", "SRM_API_KEYS", "valueFrom", "secretKeyRef", "optional"),
            GONE,
            "Secret",
        ),
        (SERVER, (*CONTAINER, "env", "SRM_ADMIN_PORT", "value"), "9000", "9000 is no port"),
        (
            SERVER,
            (*CONTAINER, "env", "SRM_DRAIN_S", "name"),
            "SRM_DRAIN",
            "SRM_DRAIN is no setting",
        ),
        (SERVER, (*POD, "terminationGracePeriodSeconds"), 60, "must be at least 120"),
        (HPA, ("spec", "scaleTargetRef", "kind"), "Deployment", "no Deployment/srm"),
        (HPA, ("spec", "metrics", 0, "pods", "metric", "name"), "srm_slots", "'srm_slots'"),
        (HPA, ("spec", "metrics", 0, "pods", "target", "type"), "Utilization", "AverageValue"),
        (HPA, ("spec", "maxReplicas"), 2, "replicas 3 … 2"),
        (KEDA, ("spec", "triggers", 0, "metadata", "query"), "sum(srm_slots)", "'srm_slots'"),
        (KEDA, ("spec", "triggers", 1, "metadata", "threshold"), "many", "threshold = 'many'"),
        (ROUTER, (*CONTAINER, "args", 4), "app.kubernetes.io/name=x", "--selector"),
        (ROUTER, (*CONTAINER, "args", 6), "--service-discovery-port=80", "no port of these pods"),
    ],
)
def test_a_defect_is_noticed(title: str, path: tuple[Any, ...], value: Any, message: str) -> None:
    changed = copy.deepcopy(objects("fleet-keda" if title == KEDA else "fleet"))
    at: Any
    (at,) = (item for item in changed if f"{item['kind']}/{item['metadata']['name']}" == title)
    for key in path[:-1]:
        is_name = isinstance(at, list) and isinstance(key, str)
        at = next(item for item in at if item["name"] == key) if is_name else at[key]
    if value is GONE:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    result = lint(changed, metric_names())
    assert any(message in text for text in result), result


def test_a_key_that_is_given_twice_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="'a' is given twice"):
        objects_of("{a: 1, b: {c: 1}, a: 2}")


def test_the_alerts_are_those_of_prometheus() -> None:
    assert ALERTS.read_text() == alerts()


def test_probes_ask_for_routes_of_the_server() -> None:
    (server,) = (instance for instance in objects("cpu") if instance["kind"] == "StatefulSet")
    container = server["spec"]["template"]["spec"]["containers"][0]
    paths = {name: probe["httpGet"]["path"] for name, probe in container.items() if "Probe" in name}
    assert paths == {
        "startupProbe": "/ready",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    assert {*paths.values()} <= {operation.path for operation in OPERATIONS}


def test_without_keys_replicas_answer_to_the_names_of_their_services() -> None:
    result = objects("fleet")
    (server,) = (instance for instance in result if instance["kind"] == "StatefulSet")
    variables = {
        container["name"]: container.get("value")
        for container in server["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    origins = Origins((), variables["SRM_ALLOWED_HOSTS"].split(","))
    services = [
        instance["metadata"]["name"] for instance in result if instance["kind"] == "Service"
    ]
    assert len(services) == 4
    for name in (*services, "srm-0.srm-replicas"):
        for end in ("", ".srm", ".srm.svc", ".srm.svc.cluster.local", ".srm.svc.cluster.local."):
            origins.check_host(f"{name}{end}:8000")
    for name in ("evil.example", "srm.example", "srm-router.example", "svc.example"):
        with pytest.raises(NotPermitted):
            origins.check_host(name)


def test_the_router_is_told_to_open_no_circuit() -> None:
    assert "--disable-circuit-breaker" in deployed_flags()


def test_schemas_refuse_what_is_misspelt_or_unknown() -> None:
    schemas = pytest.importorskip("deploy.kubernetes.schemas", exc_type=ImportError)
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "srm"}}
    for item, count in (
        (service, 0),
        ({**service, "spec": {"selektor": {}}}, 1),
        ({**service, "apiVersion": "v9"}, 1),
    ):
        assert len(list(schemas.problems([item]))) == count


def test_outside_paths_lead_to_services_of_a_fleet() -> None:
    (route,) = (item for item in objects("gateway") if item["kind"] == "HTTPRoute")
    backends = {
        backend["name"] for rule in route["spec"]["rules"] for backend in rule["backendRefs"]
    }
    services = {item["metadata"]["name"] for item in objects("fleet") if item["kind"] == "Service"}
    assert backends == services - {"srm-replicas"}
    paths = {match["path"]["value"] for rule in route["spec"]["rules"] for match in rule["matches"]}
    assert not any(path.startswith(("/v1/admin", "/metrics")) for path in paths)


def test_a_volume_is_filled_once_and_with_a_model_alone(tmp_path: Path) -> None:
    (job,) = (item for item in objects("checkpoint") if item["kind"] == "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    volume, programs, files = (tmp_path / name for name in ("model", "bin", "files.tar"))
    programs.mkdir()
    srm = programs / "srm"
    srm.write_text(f'#!/bin/sh\nexec {sys.executable} -m srm "$@"\n')
    srm.chmod(0o755)

    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        with tarfile.open(files, "w") as archive:
            for path in folder.iterdir():
                archive.add(path, path.name)
        variables = {
            "MODEL_URL": files.as_uri(),
            "MODEL_FOLDER": str(volume),
            "PATH": f"{programs}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-c", *container["args"]]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    other, model = tmp_path / "other", ROOT / "models" / "demo"
    other.mkdir()
    (other / "config.json").write_text("{}")
    assert run(other).returncode != 0 and not (volume / "config.json").exists()
    assert run(model).returncode == 0
    names = {path.name for path in model.iterdir()}
    assert {path.name for path in volume.iterdir()} == names
    assert "has a model already" in run(other).stdout
