"""`python -m tests.kit.processes.slow_client ENDPOINT`: asks for 30 tokens, then holds its
interpreter.

No thread of it runs until a byte comes on standard input: as while one call of a library takes
long. Prints how many tokens came, or the error.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys

import numpy as np

from srm.engine.client.client import EngineClient
from srm.engine.messages import Request, SamplingParams
from srm.errors import SRMError


async def main(endpoint: str) -> None:
    client = EngineClient(endpoint)
    await client.connect()
    await client.wait_until_ready(120)
    prompt = np.array([3, 4, 7], "<i4").tobytes()
    request = Request("slow", prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    with client.open([request]) as stream:
        await asyncio.sleep(0)
        print("asked", flush=True)
        ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # keeps the interpreter lock
        try:
            while stream.unfinished:
                await stream.wait()
                outputs = stream.take_outputs()
            print(sum(len(output.token_ids) for _, output in outputs) // 4)
        except SRMError as error:
            print(error.message)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
