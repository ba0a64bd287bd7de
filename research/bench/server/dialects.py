"""`srm bench dialects`: the same samples through each dialect, in turns, as tokens a second.

One request asks for all samples of a prompt. Each dialect is given the same token ids and seed, so
it samples the same tokens, and what differs is what the server makes of them. Kept states are off,
so the tokens that the engine prefills say how often the prompt was read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec

from research.bench.frame import Record, Settings, run, table
from research.bench.host.processes import children_of_server, processes
from research.bench.host.serving import Serving, serving
from srm.engine.config import DEMO_MODEL
from srm.errors import ConfigError

_TIMEOUT_S = 3_600.0
_PREFILLED = "srm_engine_prefill_tokens_total"
PLAIN = "/v1/completions"
"""The route that the others' rates are compared with."""
_TELLING = "/generate"
"""The route whose replies have the samples' texts and token ids; others have either."""


class DialectsConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench dialects`."""

    model: Path = DEMO_MODEL
    """Model folder, with a chat template."""
    samples: int = 10_000
    """Samples of each request."""
    max_tokens: int = 32
    """Tokens of each sample."""
    logprobs: bool = False
    """Whether each token's log-probability is asked for, as trainers do."""
    repetitions: int = 7
    """Requests through each dialect, the first ones aside; the medians are shown."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(DialectsConfig, argv, "dialects", measure, markdown)


def measure(config: DialectsConfig) -> Record:
    """Return what each request through each dialect took. Raises ConfigError for other tokens."""
    with (
        serving(f"--model={config.model.resolve()}", "--prefix-cache=false") as server,
        httpx.Client(base_url=server.url, timeout=_TIMEOUT_S) as client,
    ):
        asked: dict[str, list[Record]] = {route: [] for route in DIALECTS}
        for turn in range(config.repetitions + 1):
            chat = {"messages": [{"role": "user", "content": f"How many are {turn} and 7 hats?"}]}
            ids = client.post("/v1/chat/completions/render", json=chat).json()["token_ids"]
            for route in sorted(DIALECTS, reverse=bool(turn % 2)):
                body = chat if "chat" in route else {"prompt": ids}
                asked[route].append(_ask(client, server, route, body, config, turn))
    check_same(asked)
    return {"prompt_tokens": len(ids), "dialects": {k: v[1:] for k, v in asked.items()}}


def check_same(asked: dict[str, list[Record]]) -> None:
    """Raise ConfigError unless all routes sampled the same in each turn."""
    for route, requests in asked.items():
        for turn, (request, reference) in enumerate(zip(requests, asked[_TELLING], strict=True)):
            for name in ("tokens", "texts", "ids"):
                if name in request and request[name] != reference[name]:
                    raise ConfigError(f"{route} has other {name} than {_TELLING} in turn {turn}")


def digests(reply: Any) -> dict[str, str]:
    """Return digests of the samples' texts and token ids, by index; of those the reply has."""
    choices = sorted(_choices(reply), key=lambda choice: choice.get("index", 0))
    samples = {
        "texts": [
            choice.get("message", {}).get("content", choice.get("text")) for choice in choices
        ],
        "ids": [choice.get("output_ids", choice.get("token_ids")) for choice in choices],
    }
    return {
        name: blake2b(msgspec.json.encode(values), digest_size=16).hexdigest()
        for name, values in samples.items()
        if None not in values
    }


def _ask(
    client: httpx.Client,
    server: Serving,
    route: str,
    body: dict[str, Any],
    config: DialectsConfig,
    seed: int,
) -> Record:
    make_body, count_tokens = DIALECTS[route]
    whole = make_body(body, config, seed)
    prefilled, api_s, began = _prefilled(client), _api_s(server), time.monotonic()
    reply = client.post(route, json=whole)
    seconds = time.monotonic() - began
    if not reply.is_success:
        raise ConfigError(f"{route}: {reply.status_code} {reply.text[:500]}")
    replied = msgspec.json.decode(reply.content)
    return {
        "seconds": seconds,
        "api_s": _api_s(server) - api_s,
        "bytes": len(reply.content),
        "tokens": count_tokens(replied),
        "prefilled": _prefilled(client) - prefilled,
        **digests(replied),
    }


def _api_s(server: Serving) -> float:
    """Return the processor time of the API processes."""
    table = processes()
    kinds = children_of_server(server.pid, table)
    return sum(table[child].cpu_s for child, kind in kinds.items() if kind == "api")


def _prefilled(client: httpx.Client) -> int:
    (line,) = (
        line for line in client.get("/metrics").text.splitlines() if line.startswith(_PREFILLED)
    )
    return int(float(line.split()[-1]))


def _openai(body: dict[str, Any], config: DialectsConfig, seed: int) -> dict[str, Any]:
    sampling = {
        "n": config.samples,
        "max_tokens": config.max_tokens,
        "ignore_eos": True,
        "seed": seed,
    }
    scores = {"logprobs": True if "messages" in body else 0} if config.logprobs else {}
    return {**body, **sampling, "temperature": 1.0, **scores}


def _vllm(body: dict[str, Any], config: DialectsConfig, seed: int) -> dict[str, Any]:
    sampling = _openai(body, config, seed)
    return {"token_ids": sampling.pop("prompt"), "sampling_params": sampling}


def _sglang(body: dict[str, Any], config: DialectsConfig, seed: int) -> dict[str, Any]:
    sampling = {"n": config.samples, "max_new_tokens": config.max_tokens, "ignore_eos": True}
    return {
        "input_ids": body["prompt"],
        "sampling_params": {**sampling, "sampling_seed": seed, "temperature": 1.0},
        "return_logprob": config.logprobs,
    }


def _by_usage(reply: Any) -> int:
    return int(reply["usage"]["completion_tokens"])


def _by_choices(reply: Any) -> int:
    return sum(choice["meta_info"]["completion_tokens"] for choice in _choices(reply))


def _choices(reply: Any) -> list[Any]:
    return reply if isinstance(reply, list) else reply.get("choices", [reply])


Body = Callable[[dict[str, Any], DialectsConfig, int], dict[str, Any]]
DIALECTS: dict[str, tuple[Body, Callable[[Any], int]]] = {
    PLAIN: (_openai, _by_usage),
    "/v1/chat/completions": (_openai, _by_usage),
    "/inference/v1/generate": (_vllm, _by_usage),
    "/generate": (_sglang, _by_choices),
}
"""By route, how a request is said and how its tokens are counted."""


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    settings, dialects = record["settings"], record["dialects"]
    rows = []
    for route, requests in dialects.items():
        pairs = zip(requests, dialects[PLAIN], strict=True)
        ratios = [plain["seconds"] / request["seconds"] for request, plain in pairs]
        rates = [request["tokens"] / request["seconds"] for request in requests]
        api_us = median(1e6 * request["api_s"] / request["tokens"] for request in requests)
        prefilled = max(request["prefilled"] for request in requests)
        rows.append(
            f"`{route}` | {median(rates):,.0f} | {median(ratios):.3f} "
            f"| {min(ratios):.3f} … {max(ratios):.3f} "
            f"| {api_us:.1f} µs | {requests[-1]['bytes'] / 1e6:.1f} MB | {prefilled:,}"
        )
    what = f"{settings['samples']:,} samples of {settings['max_tokens']} tokens"
    scores = " with log-probabilities" if settings["logprobs"] else ""
    return [
        f"One request for {what}{scores}, the same ones through each dialect, in turns: medians of "
        f"{settings['repetitions']}. *ratio* is the median of the ratios to `{PLAIN}`. Prompts "
        f"have {record['prompt_tokens']} tokens, of which all but the last are prefilled.",
        "",
        *table(
            "route | tok/s | ratio | of the pairs | API process a token | reply | most prefilled",
            rows,
        ),
    ]
