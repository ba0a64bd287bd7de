"""Checks manifests for what a cluster would take and not run: that all they refer to is there.

`lint` takes the objects that kustomize makes. What an API server refuses by itself is not in it:
names, quantities, mounts without a volume. Knows no cluster, no file and no other program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import pairwise
from typing import Any

import yaml

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.settings import of_values
from server.config import ServerConfig

Object = dict[str, Any]
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[KMGTPE]i|[MGTPE])?")
_POD_NAME = "statefulset.kubernetes.io/pod-name"
_EXIT_S = 20
"""Seconds that a stop of srm may take besides drain_s and snapshot_s."""
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_KEYS = "SRM_API_KEYS"
"""The only variable of srm that is no setting."""


class StrictLoader(yaml.SafeLoader):  # type: ignore[misc]  # of a package without types
    """Refuses a key that is given twice, of which YAML's own loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", node.start_mark
                )
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def objects_of(text: str) -> list[Object]:
    """Return the objects of a YAML text. Raises yaml.YAMLError, for a key given twice too."""
    return [one for one in yaml.load_all(text, StrictLoader) if one]


def lint(objects: Sequence[Object], metrics: Set[str]) -> list[str]:
    """Return what is wrong with objects that are applied together; `metrics` are srm's names."""
    found = [problem for check in _CHECKS for problem in check(objects)]
    return found + list(_scaling(objects, metrics))


def title_of(one: Object) -> str:
    """Return kind and name."""
    return f"{one['kind']}/{one['metadata']['name']}"


def _of(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def _workloads(objects: Sequence[Object]) -> list[Object]:
    return _of(objects, "StatefulSet", "Deployment")


def _pod(workload: Object) -> Object:
    pod: Object = workload["spec"]["template"]
    return pod


def _containers(objects: Sequence[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Yield a title, the workload and the container, of each container."""
    for workload in _workloads(objects):
        for one in _pod(workload)["spec"]["containers"]:
            yield f"{title_of(workload)}, container {one['name']}", workload, one


def _selected(objects: Sequence[Object], labels: Object) -> list[Object]:
    """Return the workloads whose pods have these labels, one pod's own name being one."""
    wanted = dict(labels)
    pod_name = wanted.pop(_POD_NAME, None)
    return [
        one
        for one in _workloads(objects)
        if wanted.items() <= _pod(one)["metadata"].get("labels", {}).items()
        and (pod_name is None or re.fullmatch(rf"{one['metadata']['name']}-\d+", pod_name))
    ]


def _ports(workload: Object) -> dict[str | int, int]:
    """Return the ports of a workload's containers, by name and by number."""
    found: dict[str | int, int] = {}
    for one in _pod(workload)["spec"]["containers"]:
        for port in one.get("ports", []):
            found |= {
                port["name"]: port["containerPort"],
                port["containerPort"]: port["containerPort"],
            }
    return found


def _volumes(objects: Sequence[Object]) -> Iterator[str]:
    claims = {one["metadata"]["name"] for one in _of(objects, "PersistentVolumeClaim")}
    for workload in _workloads(objects):
        for one in _pod(workload)["spec"].get("volumes", []):
            claim = one.get("persistentVolumeClaim", {}).get("claimName")
            if claim is not None and claim not in claims:
                yield f"{title_of(workload)}: volume {one['name']} has no claim {claim!r}"


def _probes(objects: Sequence[Object]) -> Iterator[str]:
    for title, workload, one in _containers(objects):
        for name in ("readinessProbe", "livenessProbe"):
            if name not in one:
                yield f"{title}: there is no {name}"
        for name in _PROBES:
            port = one.get(name, {}).get("httpGet", {}).get("port")
            if port is not None and port not in _ports(workload):
                yield f"{title}: {name}: port {port!r} is none of the container's"


def _resources(objects: Sequence[Object]) -> Iterator[str]:
    for title, _, one in _containers(objects):
        for name in ("cpu", "memory"):
            if name not in one.get("resources", {}).get("requests", {}):
                yield f"{title}: requests has no {name}"


def _security(objects: Sequence[Object]) -> Iterator[str]:
    """Yield breaches of the restricted Pod Security Standard, and a root that can be written to."""
    for title, workload, one in _containers(objects):
        pod = _pod(workload)["spec"].get("securityContext", {})
        own = one.get("securityContext", {})
        for name, value in {
            "runAsNonRoot": pod.get("runAsNonRoot") is True,
            "runAsUser": pod.get("runAsUser", 0) > 0,
            "seccompProfile": pod.get("seccompProfile") == {"type": "RuntimeDefault"},
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
            "capabilities": own.get("capabilities") == {"drop": ["ALL"]},
        }.items():
            if not value:
                yield f"{title}: securityContext.{name} is not as restricted pods must have it"
        if _pod(workload)["spec"].get("enableServiceLinks") is not False:
            yield f"{title}: enableServiceLinks must be false: a Service srm would set SRM_PORT"


def _selectors(objects: Sequence[Object]) -> Iterator[str]:
    for one in _of(objects, "Service"):
        pods = _selected(objects, one["spec"].get("selector", {}))
        if not pods:
            yield f"{title_of(one)}: its selector matches no pods"
        for port in one["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            if not all(target in _ports(pod) for pod in pods):
                yield f"{title_of(one)}: targetPort = {target!r} is no port of its pods"
    for one in _of(objects, "PodDisruptionBudget"):
        if not _selected(objects, one["spec"]["selector"]["matchLabels"]):
            yield f"{title_of(one)}: its selector matches no pods"
    for one in _of(objects, "ServiceMonitor"):
        labels = one["spec"]["selector"]["matchLabels"].items()
        services = [
            service
            for service in _of(objects, "Service")
            if labels <= service["metadata"].get("labels", {}).items()
        ]
        if len(services) != 1:
            yield f"{title_of(one)}: its selector matches {len(services)} Services and not one"
        for end in one["spec"]["endpoints"]:
            ports = {port["name"] for service in services for port in service["spec"]["ports"]}
            if end["port"] not in ports:
                yield f"{title_of(one)}: port = {end['port']!r} is none of {sorted(ports)}"


def _network(objects: Sequence[Object]) -> Iterator[str]:
    policies = _of(objects, "NetworkPolicy")
    if not any(
        one["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} for one in policies
    ):
        yield "no NetworkPolicy denies all that no other one allows"
    for one in policies:
        chosen = one["spec"]["podSelector"].get("matchLabels", {})
        pods = _selected(objects, chosen)
        if not pods:
            yield f"{title_of(one)}: podSelector matches no pods"
        for way, ends in (("ingress", "from"), ("egress", "to")):
            for rule in one["spec"].get(way, []):
                names = [
                    port["port"] for port in rule.get("ports", []) if isinstance(port["port"], str)
                ]
                others = [
                    pod
                    for end in rule.get(ends, [])
                    if "namespaceSelector" not in end
                    for pod in _selected(objects, end["podSelector"].get("matchLabels", {}))
                ]
                for name in names:
                    if not all(
                        name in _ports(pod) for pod in (pods if way == "ingress" else others)
                    ):
                        yield f"{title_of(one)}: {way}: port {name!r} is none of the pods'"
                if way == "egress" and rule.get("to") and names and not others:
                    yield f"{title_of(one)}: egress: podSelector matches no pods"


def _references(objects: Sequence[Object]) -> Iterator[str]:
    titles = {title_of(one): one for one in objects}
    for one in _workloads(objects):
        spec = _pod(one)["spec"]
        account = spec.get("serviceAccountName")
        if account is not None and f"ServiceAccount/{account}" not in titles:
            yield f"{title_of(one)}: there is no ServiceAccount {account!r}"
        if one["kind"] == "StatefulSet":
            service = titles.get(f"Service/{one['spec']['serviceName']}", {"spec": {}})
            if service["spec"].get("clusterIP") != "None":
                yield f"{title_of(one)}: serviceName must be a Service with clusterIP: None"
    for title, _, one in _containers(objects):
        for variable in one.get("env", []):
            for kind, key in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
                ref = variable.get("valueFrom", {}).get(key)
                if ref and not ref.get("optional") and f"{kind}/{ref['name']}" not in titles:
                    yield f"{title}: {variable['name']}: there is no {kind} {ref['name']!r}"
    for one in _of(objects, "RoleBinding"):
        for ref in (one["roleRef"], *one["subjects"]):
            if f"{ref['kind']}/{ref['name']}" not in titles:
                yield f"{title_of(one)}: there is no {ref['kind']} {ref['name']!r}"


def _discovery(objects: Sequence[Object]) -> Iterator[str]:
    """Arguments of the router that name other objects."""
    for title, _, one in _containers(objects):
        arguments: list[str] = one.get("args", [])
        if "--service-discovery" not in arguments:
            continue
        label = next((b for a, b in pairwise(arguments) if a == "--selector"), "")
        name, _, value = label.partition("=")
        pods = _selected(objects, {name: value})
        if not pods:
            yield f"{title}: --selector {label} matches no pods"
        (port,) = (a for a in arguments if a.startswith("--service-discovery-port="))
        if not all(int(port.partition("=")[2]) in _ports(pod) for pod in pods):
            yield f"{title}: {port} is no port of these pods"


def _settings(objects: Sequence[Object]) -> Iterator[str]:
    """Settings of srm: known, in their ranges, and agreeing with ports and the time for a stop."""
    for title, workload, one in _containers(objects):
        variables = {v["name"]: v.get("value") for v in one.get("env", [])}
        values = {
            name.removeprefix("SRM_").lower(): value
            for name, value in variables.items()
            if name.startswith("SRM_") and name != _KEYS
        }
        if not values:
            continue
        known = {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}
        for name in values.keys() - known:
            yield f"{title}: SRM_{name.upper()} is no setting"
        of_engine, of_server = (
            {field: values[field] for field in kind.__struct_fields__ if values.get(field)}
            for kind in (EngineConfig, ServerConfig)
        )
        try:
            engine = of_values(EngineConfig, of_engine, "env")
            of_values(ServerConfig, of_server, "env")
        except ConfigError as error:
            yield f"{title}: {error}"
            continue
        for name in ("port", "admin_port"):
            if values.get(name) and int(values[name]) not in _ports(workload):
                yield f"{title}: SRM_{name.upper()} = {values[name]} is no port of the pod"
        hook = one.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed = hook + engine.drain_s + engine.snapshot_s + _EXIT_S
        given = _pod(workload)["spec"].get("terminationGracePeriodSeconds", 30)
        if given < needed:
            yield (
                f"{title}: terminationGracePeriodSeconds = {given} must be at least {needed:g}: "
                f"preStop {hook} + drain_s {engine.drain_s:g} + snapshot_s {engine.snapshot_s:g} + "
                f"{_EXIT_S}"
            )


def _scaling(objects: Sequence[Object], metrics: Set[str]) -> Iterator[str]:
    titles = {title_of(one) for one in objects}
    scalers = _of(objects, "HorizontalPodAutoscaler", "ScaledObject")
    for one in scalers:
        spec = one["spec"]
        target = "{kind}/{name}".format(**spec["scaleTargetRef"])
        if target not in titles:
            yield f"{title_of(one)}: there is no {target}"
        least, most = (
            spec.get(f"{way}Replicas") or spec.get(f"{way}ReplicaCount") for way in ("min", "max")
        )
        if not 1 <= least <= most:
            yield f"{title_of(one)}: replicas {least} … {most} must be 1 or more, and in order"
        for metric in spec.get("metrics", []):
            name, goal = metric["pods"]["metric"]["name"], metric["pods"]["target"]
            if name not in metrics:
                yield f"{title_of(one)}: srm has no metric {name!r}"
            if goal["type"] != "AverageValue" or not _QUANTITY.fullmatch(goal["averageValue"]):
                yield f"{title_of(one)}: {name}: the target must be an AverageValue, a quantity"
        for trigger in spec.get("triggers", []):
            names = set(re.findall(r"\bsrm_\w+", trigger["metadata"]["query"]))
            for name in sorted(names - metrics) or ([] if names else ["in the query"]):
                yield f"{title_of(one)}: srm has no metric {name!r}"
            threshold = trigger["metadata"]["threshold"]
            if not _QUANTITY.fullmatch(threshold):
                yield f"{title_of(one)}: threshold = {threshold!r} is no quantity"
    if len({str(one["spec"]["scaleTargetRef"]) for one in scalers}) < len(scalers):
        yield "two autoscalers have the same target"


_CHECKS: tuple[Callable[[Sequence[Object]], Iterator[str]], ...] = (
    *(_volumes, _probes, _resources, _security, _selectors, _network, _references),
    *(_discovery, _settings),
)
