"""Whether settings of srm in manifests exist, have values in their ranges, and fit their pods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.kubernetes.manifests import Object, title_of
from srm.engine.config import EngineConfig
from srm.errors import ConfigError
from srm.server.config import ServerConfig
from srm.settings import build_struct

EXIT_S = 20
"""Seconds that a stop of srm may take besides drain_s and snapshot_s."""
KEYS = "SRM_API_KEYS"
"""The only variable of srm that is no setting."""


def settings_problems(objects: Sequence[Object]) -> Iterator[str]:
    """Yield what is wrong with settings of srm in the containers of these objects."""
    for workload in objects:
        if workload["kind"] not in {"StatefulSet", "Deployment", "Job"}:
            continue
        pod = workload["spec"]["template"]["spec"]
        for container in pod["containers"]:
            title = f"{title_of(workload)}, container {container['name']}"
            for problem in _container_problems(container, pod):
                yield f"{title}: {problem}"


def _container_problems(container: Object, pod: Object) -> Iterator[str]:
    variables = {v["name"]: v.get("value") for v in container.get("env", [])}
    values = {
        name.removeprefix("SRM_").lower(): value
        for name, value in variables.items()
        if name.startswith("SRM_") and name != KEYS
    }
    if not values:
        return
    known = {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}
    for name in values.keys() - known:
        yield f"SRM_{name.upper()} is no setting"
    of_engine, of_server = (
        {field: values[field] for field in kind.__struct_fields__ if values.get(field)}
        for kind in (EngineConfig, ServerConfig)
    )
    try:
        engine = build_struct(EngineConfig, of_engine, "env")
        build_struct(ServerConfig, of_server, "env")
    except ConfigError as error:
        yield str(error)
        return
    ports = {port["containerPort"] for c in pod["containers"] for port in c.get("ports", [])}
    for name in ("port", "admin_port"):
        if values.get(name) and int(values[name]) not in ports:
            yield f"SRM_{name.upper()} = {values[name]} is no port of the pod"
    hook = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    needed = hook + engine.drain_s + engine.snapshot_s + EXIT_S
    given = pod.get("terminationGracePeriodSeconds", 30)
    if given < needed:
        yield (
            f"terminationGracePeriodSeconds = {given} must be at least {needed:g}: preStop {hook} "
            f"+ drain_s {engine.drain_s:g} + snapshot_s {engine.snapshot_s:g} + {EXIT_S}"
        )
