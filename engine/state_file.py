"""Files of states: what the model remembers of some tokens, as a server and Python exchange it."""

from __future__ import annotations

import json
from hashlib import blake2b

import msgspec
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from srm.errors import UNDECODABLE, InvalidRequest

FORMAT = "srm-state-1"
MOST_HEADER = 4_096
"""Most bytes of a file that are neither the state nor tokens."""
ROW_BYTES = 512
"""Bytes that a state counts for besides its content."""


class StateContent(msgspec.Struct, frozen=True):
    """Tokens, and the state after all of them but the last."""

    token_ids: bytes
    """int32 little-endian, at least one."""
    state: bytes
    """float32[state_width] little-endian; empty for one token, and where it was not made."""

    @property
    def num_bytes(self) -> int:
        return len(self.token_ids) + len(self.state) + ROW_BYTES

    def digest(self, fingerprint: str, arithmetic: str) -> str:
        """Return a checksum of it and of what made it."""
        about = f"{fingerprint}\n{arithmetic}\n{len(self.token_ids)}\n".encode()
        return blake2b(about + self.token_ids + self.state, digest_size=16).hexdigest()


def to_file(content: StateContent, fingerprint: str, arithmetic: str) -> bytes:
    """Return a safetensors file: `state`, float32, and `token_ids`, int32. Its metadata is one
    field, since the library writes several in any order."""
    digest = content.digest(fingerprint, arithmetic)
    about = {"fingerprint": fingerprint, "arithmetic": arithmetic, "digest": digest}
    token_ids = np.frombuffer(content.token_ids, "<i4")
    arrays = {"state": np.frombuffer(content.state, "<f4"), "token_ids": token_ids}
    return safetensors.numpy.save(arrays, metadata={FORMAT: json.dumps(about)})


def from_file(file: bytes) -> tuple[StateContent, str, str]:
    """Return what `to_file` was given. Raises InvalidRequest for any other bytes."""
    try:
        length = int.from_bytes(file[:8], "little")
        if length > MOST_HEADER:
            raise ValueError(f"its header has {length} bytes")
        arrays = safetensors.numpy.load(file)
        metadata = json.loads(file[8 : 8 + length])["__metadata__"]
        about = msgspec.json.decode(metadata[FORMAT], type=dict[str, str])
        made_by = about["fingerprint"], about["arithmetic"]
        digest, state, token_ids = about["digest"], arrays["state"], arrays["token_ids"]
    except (*UNDECODABLE, SafetensorError, KeyError):
        raise InvalidRequest(f"it is no {FORMAT} file, or is damaged", "file") from None
    for name, array, kind in (("state", state, "float32"), ("token_ids", token_ids, "int32")):
        if array.dtype != kind or array.ndim != 1:
            raise InvalidRequest(
                f"{name} must be a row of {kind}, got {array.dtype} of shape {array.shape}", name
            )
    content = StateContent(token_ids.tobytes(), state.tobytes())
    if content.digest(*made_by) != digest:
        raise InvalidRequest("the file's digest is of other bytes: it is damaged", "file")
    return content, *made_by
