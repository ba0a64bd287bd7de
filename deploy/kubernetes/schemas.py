"""Whether objects fit the schemas of their kinds: Kubernetes' own ones, and those of custom kinds.

Those of custom kinds are packages of npm; they do not notice fields that are misspelt.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import kubernetes_validate

from deploy.kubernetes.manifests import Object, title_of

PACKAGES = {
    "monitoring.coreos.com": "@kubernetes-models/prometheus-operator",
    "keda.sh": "@kubernetes-models/keda",
    "gateway.networking.k8s.io": "@kubernetes-models/gateway-api",
}
"""By group: the package that has its schemas."""
_PROGRAM = """
import {readFileSync} from "node:fs";
for (const [module, one] of JSON.parse(readFileSync(0))) {
  const kinds = await import(module);
  try { new kinds[one.kind](one).validate(); }
  catch (error) { console.log(`${one.kind}/${one.metadata.name}: ${error.message}`); }
}
"""


def group_of(object_: Object) -> str:
    group: str = object_["apiVersion"].rpartition("/")[0]
    return group


def is_built_in(object_: Object) -> bool:
    """Return whether Kubernetes itself has the kind, and not a CustomResourceDefinition."""
    group = group_of(object_)
    return group not in PACKAGES and ("." not in group or group.endswith(".k8s.io"))


def problems(objects: Sequence[Object]) -> Iterator[str]:
    """Yield what does not fit Kubernetes' schemas, in strict mode. Leaves out custom kinds."""
    version = kubernetes_validate.latest_version()
    for object_ in filter(is_built_in, objects):
        try:
            kubernetes_validate.validate(object_, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{title_of(object_)}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError:
            kind = f"{object_['kind']} of {object_['apiVersion']}"
            yield f"{title_of(object_)}: Kubernetes {version} has no {kind}"


def custom_problems(objects: Sequence[Object], folder: Path) -> list[str]:
    """Return what does not fit the schemas of the packages that npm installed in the folder.

    Raises KeyError for a group that no package is known of.
    """
    custom = [object_ for object_ in objects if not is_built_in(object_)]
    given = [
        (f"{PACKAGES[group_of(problem)]}/{problem['apiVersion']}/{problem['kind']}", problem)
        for problem in custom
    ]
    done = subprocess.run(
        ["node", "--input-type=module", "--eval", _PROGRAM],
        input=json.dumps(given),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
    )
    return done.stdout.splitlines()
