"""Whether objects fit the schemas of their kinds: Kubernetes' own ones, and those of custom kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jsonschema
import kubernetes_validate

from deploy.kubernetes.lint import Object, objects_of

Kind = tuple[str, str]
"""apiVersion and kind."""


def kind_of(one: Object) -> Kind:
    return one["apiVersion"], one["kind"]


def is_built_in(one: Object) -> bool:
    """Return whether Kubernetes itself has the kind, and not a CustomResourceDefinition."""
    group = one["apiVersion"].rpartition("/")[0]
    return "." not in group or group.endswith(".k8s.io")


def problems(objects: Sequence[Object], custom: Mapping[Kind, Object]) -> Iterator[str]:
    """Yield what does not fit. Custom kinds that `custom` has no schema of are left out."""
    version = kubernetes_validate.latest_version()
    for one in objects:
        title = f"{one['kind']}/{one['metadata']['name']}"
        try:
            if is_built_in(one):
                kubernetes_validate.validate(one, version, strict=True)
            elif schema := custom.get(kind_of(one)):
                jsonschema.validate(one, schema)
        except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
            yield f"{title}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError:
            yield f"{title}: Kubernetes {version} has no {one['kind']} of {one['apiVersion']}"


def custom_schemas(folder: Path) -> dict[Kind, Object]:
    """Return the schemas of the CustomResourceDefinitions in a folder's YAML files."""
    found = {}
    for path in sorted(folder.glob("*.y*ml")):
        for one in objects_of(path.read_text()):
            names, group = one["spec"]["names"], one["spec"]["group"]
            for version in one["spec"]["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                found[f"{group}/{version['name']}", names["kind"]] = schema
    return found


def strict(schema: Object) -> Object:
    """Return the schema with objects that take no other fields than those it names."""
    made = dict(schema)
    for name in ("properties", "items", "additionalProperties"):
        if isinstance(inner := made.get(name), dict):
            is_table = name == "properties"
            made[name] = {k: strict(v) for k, v in inner.items()} if is_table else strict(inner)
    if "properties" in made and "x-kubernetes-preserve-unknown-fields" not in made:
        made.setdefault("additionalProperties", False)
    return made
