"""What holds arrays is never compared by value: an array has no truth of its own."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest

from srm import engine, loadtest, server


def records(package: ModuleType) -> Iterator[type]:
    """Dataclasses and structs, which compare their fields unless told not to."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__") and ".programs" not in module.name:
            for var in vars(importlib.import_module(module.name)).values():
                is_ours = isinstance(var, type) and var.__module__ == module.name
                if is_ours and (dataclasses.is_dataclass(var) or issubclass(var, msgspec.Struct)):
                    yield var


def holds_arrays(hint: Any) -> bool:
    """Whether a field of this type may be an array, or hold one in a tuple, list or mapping."""
    if np.ndarray in (hint, get_origin(hint)) or any(map(holds_arrays, get_args(hint))):
        return True
    is_named_tuple = isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")
    return is_named_tuple and any(map(holds_arrays, get_type_hints(hint).values()))


def compares_fields(one: type) -> bool:
    if issubclass(one, msgspec.Struct):
        return one.__struct_config__.eq
    return one.__eq__ is not object.__eq__


@pytest.mark.parametrize("package", [engine, server, loadtest], ids=lambda one: one.__name__)
def test_parked_pieces_and_all_else_with_arrays_are_told_apart_by_identity(
    package: ModuleType,
) -> None:
    compared = [
        record.__qualname__
        for record in records(package)
        if compares_fields(record) and any(map(holds_arrays, get_type_hints(record).values()))
    ]
    assert not compared, "eq=False is missing"
