"""States of the Python API: what the model remembers of some tokens, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from srm.engine.messages import Status, begin_from
from srm.engine.state_file import StateContent, from_file, to_file
from srm.engine.steps.batch import F32, I32
from srm.errors import InvalidRequest, show_value
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

    def __post_init__(self) -> None:
        """Check it, and have arrays of its own. Raises InvalidRequest."""
        ids, values = np.array(self.token_ids), np.array(self.values)
        are_ids = ids.ndim == 1 and ids.size and ids.dtype.kind in "iu"
        if not are_ids or not 0 <= ids.min() <= ids.max() < 2**31:
            raise InvalidRequest(
                "token_ids must be a row of integers 0 … 2**31 - 1, at least one; got "
                f"{show_value(self.token_ids)}",
                "token_ids",
            )
        are_values = values.ndim == 1 and values.dtype.kind in "iuf"
        if not are_values or not (abs(values) <= np.finfo(np.float32).max).all():
            raise InvalidRequest(
                f"values must be a row of finite float32, got {show_value(self.values)}", "values"
            )
        for name, array in (
            ("token_ids", ids.astype(np.int32)),
            ("values", values.astype(np.float32)),
        ):
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def save(self, path: str | Path) -> None:
        """Write it, in one step, as the file of `/v1/states/{id}/content`. Raises OSError."""
        own = StateContent(self.token_ids.tobytes(), self.values.tobytes())
        partial = Path(f"{Path(path)}.partial")
        try:
            partial.write_bytes(to_file(own, self.fingerprint, self.arithmetic))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

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
        return begin_from(self.values.tobytes(), len(self.token_ids) - 1, self.fingerprint)
