"""POST /v1/trees: many texts that follow one prompt and share what they have in common."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, Raw
from starlette.responses import Response

from srm.engine.client.client import EngineClient
from srm.engine.tree_search import I32, TreeNode, TreeSearch
from srm.errors import InvalidRequest
from srm.server import metrics
from srm.server.dialects.completions.models import Models
from srm.server.generation.engine_request import (
    RequestOwner,
    engine_requests,
    of_current_request,
    sampling_params,
)
from srm.server.generation.matching import Pattern
from srm.server.generation.prompts import Prompt, encode_prompts
from srm.server.generation.states import States
from srm.server.generation.trees import grow
from srm.server.generation.verification import Verifier
from srm.server.http.bodies import json_reply
from srm.server.http.request_log import CURRENT
from srm.server.http.responses import EventStream, add_operations, frame
from srm.server.schema.completion_response import Usage
from srm.server.schema.json_parts import TokenIds
from srm.server.schema.openapi import BodySchema, Operation
from srm.server.schema.trees import TreeReply, TreeReplyNode, TreeRequest, parse_tree_request
from srm.server.schema.verify import VERIFY_FORMS
from srm.server.text.text import Text

_MOST_SPLITS = 4_096
"""Most tokens that `split` may be found in."""
_EXAMPLES = {
    "Samples of a line each": {
        "prompt": "Question: Ava has 6 boxes",
        "tree": {"branching": 4, "depth": 3, "width": 4, "node_tokens": 32},
        "split": "\n",
    },
    "Beam search": {
        "prompt": "Question: Ava has 6 boxes",
        "tree": {"candidates": "likeliest", "branching": 8, "width": 4, "depth": 16},
    },
}
OPERATIONS = (
    Operation("POST", "/v1/trees", "A tree of samples of what may follow a prompt.", TreeReply,
              body=BodySchema(TreeRequest, {"prompt": (str, TokenIds), "verify": VERIFY_FORMS[:1]},
                              examples=_EXAMPLES),
              events=TreeReply, parts=(TreeReplyNode,), errors=(404, 409, 504)),
)  # fmt: skip


class Trees:
    """Grows the trees of an API process."""

    def __init__(self, client: EngineClient, states: States, models: Models, text: Text) -> None:
        self._client, self._states, self._models, self._text = client, states, models, text

    async def answer(self, body: bytes) -> Response:
        """Return the reply to a body. Raises the RequestError to answer with."""
        asked, owner = parse_tree_request(body), of_current_request()
        self._models.check(asked.model)
        verifier = None if asked.verify is None else Verifier([asked.verify])
        search = await self._search(asked, owner, id := f"tree-{uuid.uuid4().hex}")
        parts = self._parts(asked, search, verifier, id)
        if asked.stream:
            return EventStream(_framed(parts))
        nodes: list[Raw] = []
        async with aclosing(parts):
            async for reply in parts:  # the same each time
                nodes += reply.nodes
        reply.nodes = nodes
        return json_reply(reply)

    async def _search(self, asked: TreeRequest, owner: RequestOwner, id: str) -> TreeSearch:
        begun = None
        if asked.state is not None:
            begun = await self._states.given(asked.state, owner, asked.refeed)
        splits = []
        if asked.split is not None:
            splits = await asyncio.to_thread(self._split_ids, Pattern(asked.split, False, "split"))
        request = asked.completion(splits)
        (token_ids,) = await encode_prompts(request, self._text, begun)
        params = sampling_params(request, self._text)
        (template,) = engine_requests(
            *(id, request, params, owner, [Prompt(token_ids)], [0], [None], begun)
        )
        return TreeSearch(asked.shape, self._text.model, template, self._decode)

    def _decode(self, token_ids: I32) -> str:
        return self._text.decode(token_ids.tobytes()).decode(errors="replace")

    def _split_ids(self, pattern: Pattern) -> list[int]:
        """Return the tokens in whose text the pattern is found. Blocks."""
        texts = (piece.decode(errors="replace") for piece in self._text.table().entries)
        ids = [token for token, text in enumerate(texts) if pattern.find(text).matched]
        if not 0 < len(ids) <= _MOST_SPLITS:
            raise InvalidRequest(
                f"split is found in {len(ids)} tokens of the vocabulary; it must be in 1 to "
                f"{_MOST_SPLITS}",
                "split",
            )
        return ids

    async def _parts(
        self, asked: TreeRequest, search: TreeSearch, verifier: Verifier | None, id: str
    ) -> AsyncGenerator[TreeReply, None]:
        """Yield the nodes as they come, and last the usage; scores decide which are expanded."""
        reply = TreeReply(
            id=id,
            created=int(time.time()),
            model=self._models.name,
            nodes=[],
            system_fingerprint="",
        )
        num_prompt, charge = len(search.asked.prompt_token_ids) // 4, of_current_request().charge
        charge(num_prompt)
        try:
            async with aclosing(grow(self._client, search, charge)) as growing:
                async for nodes in growing:
                    scores = await self._score(asked, nodes, verifier)
                    search.add(nodes)
                    reply.nodes = [
                        _shown(node, score) for node, score in zip(nodes, scores, strict=True)
                    ]
                    known = self._client.fingerprints
                    reply.weights_version = search.version
                    reply.system_fingerprint = known.get(search.version, "")
                    if search.first_version != search.version:
                        reply.first_weights_version = search.first_version
                    yield reply
            reply.nodes = []
            total = num_prompt + search.num_tokens
            reply.usage = Usage(num_prompt, search.num_tokens, total)
            yield reply
        finally:
            _account(num_prompt, search.num_tokens)

    async def _score(
        self, asked: TreeRequest, nodes: list[TreeNode], verifier: Verifier | None
    ) -> list[float | None]:
        """Set what nodes are expanded by; return their scores by `verify`, None without it."""
        scores: list[float | None] = [None] * len(nodes)
        if verifier is not None:
            scores = [*await verifier.scores([(0, node.text) for node in nodes])]
        for node, score in zip(nodes, scores, strict=True):
            if asked.score == "mean_logprob":
                node.score = node.mean_logprob
            elif asked.score == "verify" and score is not None:
                node.score, node.tie = score, node.mean_logprob
        return scores


def _shown(node: TreeNode, score: float | None) -> Raw:
    shown = TreeReplyNode(
        id=node.number,
        parent=None if node.parent is None else node.parent.number,
        depth=node.depth,
        text=node.decode(node.token_ids),
        token_ids=node.token_ids.tolist(),
        logprobs=node.logprobs.tolist(),
        logprob=node.logprob,
        score=UNSET if score is None else score,
        ends=node.ends,
        is_leaf=node.is_leaf,
    )
    return Raw(msgspec.json.encode(shown))


async def _framed(parts: AsyncGenerator[TreeReply, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(parts):
        async for reply in parts:
            yield frame([msgspec.json.encode(reply)])


def _account(prompt_tokens: int, completion_tokens: int) -> None:
    metrics.PROMPT_TOKENS.inc(prompt_tokens)
    metrics.COMPLETION_TOKENS.inc(completion_tokens)
    if (entry := CURRENT.get(None)) is not None:
        entry.prompt_tokens += prompt_tokens
        entry.completion_tokens += completion_tokens


def add_routes(router: APIRouter, trees: Trees, max_body_bytes: int) -> None:
    """Add the route of this module."""
    add_operations(router, OPERATIONS, [trees.answer], max_body_bytes)
