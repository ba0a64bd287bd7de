"""States of the Python API: what the model remembers of some tokens, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from srm.engine.messages import Status, begin_from
from srm.engine.state_file import StateContent, from_file, to_file
from srm.engine.steps.batch import F32, I32
from srm.errors import InvalidRequest
from srm.files import read_file


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

    def save(self, path: str | Path) -> None:
        """Write it as the file that `/v1/states/{id}/content` has. Raises OSError."""
        arrays = (self.token_ids, "<i4"), (self.values, "<f4")
        own = StateContent(*(np.asarray(array, kind).tobytes() for array, kind in arrays))
        Path(path).write_bytes(to_file(own, self.fingerprint, self.arithmetic))

    @classmethod
    def load(cls, path: str | Path) -> State:
        """Read such a file. Raises OSError, and InvalidRequest for one that is none."""
        own, *made_by = from_file(read_file(Path(path)))
        values = np.frombuffer(own.state, np.float32)
        return cls(np.frombuffer(own.token_ids, np.int32), values, *made_by)

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
