"""verifiers' two clients: TrainClient, which prime-rl samples by, over two turns, and EvalClient.

Prints JSON. Arguments: the URL, a folder with the tokenizer and its chat template.
"""

import asyncio
import json
import sys
from typing import Any

from verifiers.v1 import EvalClientConfig, TrainClientConfig, resolve_client
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

url, tokenizer = sys.argv[1:]
SAMPLING = {"temperature": 0.9, "max_tokens": 24, "seed": 1}
TURNS = ("How many are 2 hats and 3 hats?", "And 4 hats?")


async def talk(client: Any, **more: Any) -> list[dict[str, Any]]:
    """Both turns, the second with the first one's answer."""
    messages: list[dict[str, Any]] = []
    turns = []
    for question in TURNS:
        messages.append({"role": "user", "content": question})
        body = {"model": "demo", "messages": messages, **SAMPLING}
        sampling = SamplingConfig(**SAMPLING, **more)
        reply = await client.get_response(ChatDialect(), body, sampling, session_id="one")
        tokens = reply.tokens
        turns.append(
            {
                "content": reply.message.content,
                "finish_reason": reply.finish_reason,
                "usage": [reply.usage.prompt_tokens, reply.usage.completion_tokens],
                "prompt_ids": tokens and tokens.prompt_ids,
                "completion_ids": tokens and tokens.completion_ids,
                "logprobs": tokens and tokens.completion_logprobs,
            }
        )
        messages.append({"role": "assistant", "content": reply.message.content or ""})
    await client.close()
    return turns


async def run() -> dict[str, Any]:
    train = TrainClientConfig(base_url=f"{url}/v1", renderer_model_name=tokenizer)
    evaluated = EvalClientConfig(base_url=f"{url}/v1")
    reply: dict[str, Any] = {
        "train": await talk(resolve_client(train), cache_salt="7"),
        "eval": await talk(resolve_client(evaluated)),
    }
    long = {"model": "demo", "messages": [{"role": "user", "content": "hats " * 5_000}]}
    try:
        await resolve_client(train).get_response(ChatDialect(), long, SamplingConfig())
    except Exception as error:  # noqa: BLE001 - to be shown
        reply["error"] = f"{type(error).__name__}: {error}"
    return reply


print(json.dumps(asyncio.run(run())))
