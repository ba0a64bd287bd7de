"""Checks manifests for what a cluster would take and not run: that all they refer to is there.

`lint` takes the objects that kustomize makes. What an API server refuses by itself is not in it:
names, quantities, mounts without a volume.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import pairwise
from typing import Any

import yaml

from srm.engine.config import EngineConfig
from srm.errors import ConfigError
from srm.server.config import ServerConfig
from srm.settings import build_struct

Object = dict[str, Any]
CLIENTS = {"srm-client": "true"}
"""The label of pods that are no part of an overlay, and may send it requests."""
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
        entries: dict[Any, Any] = super().construct_mapping(node, deep)
        return entries


def objects_of(text: str) -> list[Object]:
    """Return the objects of a YAML text. Raises yaml.YAMLError, for a key given twice too."""
    return [object_ for object_ in yaml.load_all(text, StrictLoader) if object_]


def lint(objects: Sequence[Object], metrics: Set[str]) -> list[str]:
    """Return what is wrong with objects that are applied together; `metrics` are srm's names."""
    problems = [problem for check in _CHECKS for problem in check(objects)]
    return problems + list(_scaling(objects, metrics))


def title_of(object_: Object) -> str:
    """Return kind and name."""
    return f"{object_['kind']}/{object_['metadata']['name']}"


def _of(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [object_ for object_ in objects if object_["kind"] in kinds]


def _workloads(objects: Sequence[Object]) -> list[Object]:
    return _of(objects, "StatefulSet", "Deployment", "Job")


def _pod(workload: Object) -> Object:
    pod: Object = workload["spec"]["template"]
    return pod


def _containers(objects: Sequence[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Yield a title, the workload and the container, of each container."""
    for workload in _workloads(objects):
        for container in _pod(workload)["spec"]["containers"]:
            yield f"{title_of(workload)}, container {container['name']}", workload, container


def _selected(objects: Sequence[Object], labels: Object) -> list[Object]:
    """Return the workloads whose pods have these labels, one pod's own name being one."""
    wanted = dict(labels)
    pod_name = wanted.pop(_POD_NAME, None)
    return [
        workload
        for workload in _workloads(objects)
        if wanted.items() <= _pod(workload)["metadata"].get("labels", {}).items()
        and (pod_name is None or re.fullmatch(rf"{workload['metadata']['name']}-\d+", pod_name))
    ]


def _ports(workload: Object) -> dict[str | int, int]:
    """Return the ports of a workload's containers, by name and by number."""
    ports: dict[str | int, int] = {}
    for container in _pod(workload)["spec"]["containers"]:
        for port in container.get("ports", []):
            ports |= {
                port["name"]: port["containerPort"],
                port["containerPort"]: port["containerPort"],
            }
    return ports


def _volumes(objects: Sequence[Object]) -> Iterator[str]:
    claims = {object_["metadata"]["name"] for object_ in _of(objects, "PersistentVolumeClaim")}
    for workload in _workloads(objects):
        for volume in _pod(workload)["spec"].get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim is not None and claim not in claims:
                yield f"{title_of(workload)}: volume {volume['name']} has no claim {claim!r}"


def _probes(objects: Sequence[Object]) -> Iterator[str]:
    for title, workload, container in _containers(objects):
        for name in ("readinessProbe", "livenessProbe"):
            if name not in container and workload["kind"] != "Job":
                yield f"{title}: there is no {name}"
        for name in _PROBES:
            port = container.get(name, {}).get("httpGet", {}).get("port")
            if port is not None and port not in _ports(workload):
                yield f"{title}: {name}: port {port!r} is none of the container's"


def _resources(objects: Sequence[Object]) -> Iterator[str]:
    for title, _, container in _containers(objects):
        for name in ("cpu", "memory"):
            if name not in container.get("resources", {}).get("requests", {}):
                yield f"{title}: requests has no {name}"


def _security(objects: Sequence[Object]) -> Iterator[str]:
    """Yield breaches of the restricted Pod Security Standard, and a root that can be written to."""
    for title, workload, container in _containers(objects):
        pod = _pod(workload)["spec"].get("securityContext", {})
        own = container.get("securityContext", {})
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
    for object_ in _of(objects, "Service"):
        pods = _selected(objects, object_["spec"].get("selector", {}))
        if not pods:
            yield f"{title_of(object_)}: its selector matches no pods"
        for port in object_["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            if not all(target in _ports(pod) for pod in pods):
                yield f"{title_of(object_)}: targetPort = {target!r} is no port of its pods"
    for object_ in _of(objects, "PodDisruptionBudget"):
        if not _selected(objects, object_["spec"]["selector"]["matchLabels"]):
            yield f"{title_of(object_)}: its selector matches no pods"
    for object_ in _of(objects, "ServiceMonitor"):
        labels = object_["spec"]["selector"]["matchLabels"].items()
        services = [
            service
            for service in _of(objects, "Service")
            if labels <= service["metadata"].get("labels", {}).items()
        ]
        if len(services) != 1:
            yield f"{title_of(object_)}: its selector matches {len(services)} Services and not one"
        for end in object_["spec"]["endpoints"]:
            ports = {port["name"] for service in services for port in service["spec"]["ports"]}
            if end["port"] not in ports:
                yield f"{title_of(object_)}: port = {end['port']!r} is none of {sorted(ports)}"


def _network(objects: Sequence[Object]) -> Iterator[str]:
    policies = _of(objects, "NetworkPolicy")
    # What is applied beside another overlay has its policy.
    if _of(objects, "Namespace") and not any(
        policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
        for policy in policies
    ):
        yield "no NetworkPolicy denies all that no other one allows"
    for policy in policies:
        chosen = policy["spec"]["podSelector"].get("matchLabels", {})
        pods = _selected(objects, chosen)
        if not pods and chosen != CLIENTS:
            yield f"{title_of(policy)}: podSelector matches no pods"
        for way, ends in (("ingress", "from"), ("egress", "to")):
            for rule in policy["spec"].get(way, []):
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
                        yield f"{title_of(policy)}: {way}: port {name!r} is none of the pods'"
                if way == "egress" and rule.get("to") and names and not others:
                    yield f"{title_of(policy)}: egress: podSelector matches no pods"


def _references(objects: Sequence[Object]) -> Iterator[str]:
    titles = {title_of(named): named for named in objects}
    for workload in _workloads(objects):
        spec = _pod(workload)["spec"]
        account = spec.get("serviceAccountName")
        if account is not None and f"ServiceAccount/{account}" not in titles:
            yield f"{title_of(workload)}: there is no ServiceAccount {account!r}"
        if workload["kind"] == "StatefulSet":
            service = titles.get(f"Service/{workload['spec']['serviceName']}", {"spec": {}})
            if service["spec"].get("clusterIP") != "None":
                yield f"{title_of(workload)}: serviceName must be a Service with clusterIP: None"
    for title, _, container in _containers(objects):
        for variable in container.get("env", []):
            for kind, key in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
                ref = variable.get("valueFrom", {}).get(key)
                if ref and not ref.get("optional") and f"{kind}/{ref['name']}" not in titles:
                    yield f"{title}: {variable['name']}: there is no {kind} {ref['name']!r}"
    for object_ in _of(objects, "RoleBinding"):
        for ref in (object_["roleRef"], *object_["subjects"]):
            if f"{ref['kind']}/{ref['name']}" not in titles:
                yield f"{title_of(object_)}: there is no {ref['kind']} {ref['name']!r}"


def _discovery(objects: Sequence[Object]) -> Iterator[str]:
    """Arguments of the router that name other objects."""
    for title, _, container in _containers(objects):
        arguments: list[str] = container.get("args", [])
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
    for title, workload, container in _containers(objects):
        variables = {v["name"]: v.get("value") for v in container.get("env", [])}
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
            engine = build_struct(EngineConfig, of_engine, "env")
            build_struct(ServerConfig, of_server, "env")
        except ConfigError as error:
            yield f"{title}: {error}"
            continue
        for name in ("port", "admin_port"):
            if values.get(name) and int(values[name]) not in _ports(workload):
                yield f"{title}: SRM_{name.upper()} = {values[name]} is no port of the pod"
        hook = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed = hook + engine.drain_s + engine.snapshot_s + _EXIT_S
        given = _pod(workload)["spec"].get("terminationGracePeriodSeconds", 30)
        if given < needed:
            yield (
                f"{title}: terminationGracePeriodSeconds = {given} must be at least {needed:g}: "
                f"preStop {hook} + drain_s {engine.drain_s:g} + snapshot_s {engine.snapshot_s:g} + "
                f"{_EXIT_S}"
            )


def _scaling(objects: Sequence[Object], metrics: Set[str]) -> Iterator[str]:
    titles = {title_of(object_) for object_ in objects}
    scalers = _of(objects, "HorizontalPodAutoscaler", "ScaledObject")
    for scaler in scalers:
        spec = scaler["spec"]
        target = "{kind}/{name}".format(**spec["scaleTargetRef"])
        if target not in titles:
            yield f"{title_of(scaler)}: there is no {target}"
        least, most = (
            spec.get(f"{way}Replicas") or spec.get(f"{way}ReplicaCount") for way in ("min", "max")
        )
        if not 1 <= least <= most:
            yield f"{title_of(scaler)}: replicas {least} … {most} must be 1 or more, and in order"
        for metric in spec.get("metrics", []):
            name, goal = metric["pods"]["metric"]["name"], metric["pods"]["target"]
            if name not in metrics:
                yield f"{title_of(scaler)}: srm has no metric {name!r}"
            if goal["type"] != "AverageValue" or not _QUANTITY.fullmatch(goal["averageValue"]):
                yield f"{title_of(scaler)}: {name}: the target must be an AverageValue, a quantity"
        for trigger in spec.get("triggers", []):
            names = set(re.findall(r"\bsrm_\w+", trigger["metadata"]["query"]))
            for name in sorted(names - metrics) or ([] if names else ["in the query"]):
                yield f"{title_of(scaler)}: srm has no metric {name!r}"
            threshold = trigger["metadata"]["threshold"]
            if not _QUANTITY.fullmatch(threshold):
                yield f"{title_of(scaler)}: threshold = {threshold!r} is no quantity"
    if len({str(scaler["spec"]["scaleTargetRef"]) for scaler in scalers}) < len(scalers):
        yield "two autoscalers have the same target"


_CHECKS: tuple[Callable[[Sequence[Object]], Iterator[str]], ...] = (
    *(_volumes, _probes, _resources, _security, _selectors, _network, _references),
    *(_discovery, _settings),
)
