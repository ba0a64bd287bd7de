"""The attack asks every route; a new route must not end it."""

from __future__ import annotations

import random

import pytest

from srm.server.routes.app import OPERATIONS
from srm.server.schema.openapi import Operation
from tests.attack import requests
from tests.attack.run import TROUBLES
from tests.attack.troubles import Troubles


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: f"{one.method} {one.path}")
def test_every_route_can_be_attacked(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "OPERATIONS", (operation,))
    calls = [requests.random_call(random.Random(seed), ["folder"]) for seed in range(20)]
    assert {call.route for call in calls} == {operation.path}


def test_every_trouble_is_one_of_the_attack() -> None:
    for names in TROUBLES.values():
        assert all(callable(getattr(Troubles, name)) for name in names)
