"""The manifests of deploy/kubernetes agree with the server, and wrong settings are noticed."""

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

from deploy.kubernetes.manifests import ALERTS, HERE, OVERLAYS, Object, alerts, rendered, title_of
from deploy.kubernetes.settings import settings_problems
from srm.server.errors import NotPermitted
from srm.server.http.cors import Origins
from srm.server.routes.health import OPERATIONS, VERSION
from tests.deploy.routers import deployed_flags
from tests.kit.serving import ROOT

CONTAINER = ("spec", "template", "spec", "containers", 0)
POD = CONTAINER[:3]


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
def test_an_overlay_has_settings_that_exist(overlay: str) -> None:
    assert list(settings_problems(objects(overlay))) == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*CONTAINER, "env", "SRM_ADMIN_PORT", "value"), "9000", "9000 is no port"),
        ((*CONTAINER, "env", "SRM_DRAIN_S", "name"), "SRM_DRAIN", "SRM_DRAIN is no setting"),
        ((*CONTAINER, "env", "SRM_DRAIN_S", "value"), "-1", "drain_s"),
        ((*POD, "terminationGracePeriodSeconds"), 60, "must be at least 120"),
    ],
)
def test_a_wrong_setting_is_noticed(path: tuple[Any, ...], value: Any, message: str) -> None:
    changed = copy.deepcopy(objects("fleet"))
    at: Any
    (at,) = (item for item in changed if title_of(item) == "StatefulSet/srm")
    for key in path[:-1]:
        is_name = isinstance(at, list) and isinstance(key, str)
        at = next(item for item in at if item["name"] == key) if is_name else at[key]
    at[path[-1]] = value
    (result,) = settings_problems(changed)
    assert message in result


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
