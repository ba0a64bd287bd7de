"""States of the Python API: what the model remembers of some tokens, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from srm.engine.messages import Status, begin_from
from srm.engine.steps.batch import F32, I32
from srm.errors import InvalidRequest


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """The model's state after all of `token_ids` but the last, which is fed by what goes on."""

    token_ids: I32
    """i32[tokens], read-only."""
    values: F32
    """f32[state_width], read-only; empty for one token."""
    fingerprint: str
    """Fingerprint of the weights that made it."""
    arithmetic: str
    """Device and data type that made it."""

    def request_fields(self, status: Status) -> dict[str, Any]:
        """Return the fields of a Request that goes on from it, on an engine that says this of
        itself. Raises InvalidRequest where other weights or another arithmetic made it."""
        own = status.fingerprint, status.arithmetic
        if (self.fingerprint, self.arithmetic) != own:
            raise InvalidRequest(
                f"state was made by weights {self.fingerprint} in {self.arithmetic}, and this "
                f"engine has {own[0]} in {own[1]}: give its token_ids as a prompt",
                "state",
            )
        if len(self.token_ids) == 1:
            return {}
        values = np.asarray(self.values, "<f4").tobytes()
        return begin_from(values, len(self.token_ids) - 1, self.fingerprint)
