"""`python -m tests.kit.processes.lying_engine`: is ready, and then tells of tokens nobody asked
for."""

from __future__ import annotations

import sys
import threading

import msgspec
import numpy as np
import zmq

from srm.engine.messages import Outputs, Status
from srm.engine.steps.tokens import step_tokens
from srm.engine.wiring import EngineWiring
from srm.settings import load

STATUS = Status("ready", 8, 0, 0, 100, 1, 0, 64, 32, "silent")
NOBODY = step_tokens(np.array([7 << 20]), np.zeros(1, np.int32), np.zeros(1, np.uint8))
OF_NOBODY = Outputs([], NOBODY.to_wire())
"""A row of a stream that the client does not have."""


def lie(router: zmq.Socket[bytes]) -> None:
    """Answer the first question that comes."""
    identity, _ = router.recv_multipart()
    for message in (STATUS, OF_NOBODY):
        router.send_multipart([identity, msgspec.msgpack.encode(message)])


if __name__ == "__main__":
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(load(EngineWiring, sys.argv[1:], prog="lying_engine").endpoint)
        lie(socket)
        threading.Event().wait()
