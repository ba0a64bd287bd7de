"""GET /v1/worker and POST /v1/worker/lines: answers lines of batches that other servers run.

The sender keeps the batch and its results. Lines are answered by this server's own engine, as if
the batch were here, and sent back as they end; whoever hangs up ends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from srm.engine.client.client import EngineClient
from srm.engine.messages import Status, refusal
from srm.errors import EngineUnavailable, InvalidRequest, SRMError
from srm.server.generation.engine_request import RequestOwner
from srm.server.http.bodies import json_reply, parsed, read_body
from srm.server.http.responses import EventStream, WhileConnected, frame
from srm.server.model_identity import digest
from srm.server.reply.responder import Endpoint
from srm.server.routes.health import VERSION
from srm.server.schema.openapi import BodySchema, Operation
from srm.server.schema.worker import (
    Identity,
    LineAnswer,
    LinesRequest,
    WorkerLine,
    WorkerStatus,
    parse_lines,
)
from srm.server.text.tokenizer_files import chat_template
from srm.server.wiring import ServerWiring

HEARTBEAT_S = 5.0
"""Most seconds of silence while lines run, so that a machine that is gone is noticed."""
OPERATIONS = (
    Operation("GET", "/v1/worker", "What answers lines of other servers' batches.", WorkerStatus),
    Operation("POST", "/v1/worker/lines", "Answer lines of a batch that another server runs.",
              ("text/event-stream",), body=BodySchema(LinesRequest)),
)  # fmt: skip
_encode = msgspec.json.Encoder().encode


class WorkerIdentity:
    """Tells what a line's answer depends on besides the line. Reads files once."""

    def __init__(self, config: ServerWiring) -> None:
        """Raises ConfigError and CheckpointError for a chat template that cannot be read."""
        template = chat_template(config.model, config.chat_template) or ""
        self.instance = digest([config.endpoint.encode()])
        self._fixed = {
            "version": VERSION,
            "model": config.model_id,
            "served_model_name": config.model_name,
            "chat_template": digest([template.encode()]),
        }

    def now(self, status: Status) -> Identity:
        """Return the identity of this server while its engine says this of itself."""
        engine = {"weights": status.fingerprint, "arithmetic": status.arithmetic}
        return {**self._fixed, **engine, "max_logprobs": str(status.max_logprobs)}


def differences(ours: Identity, theirs: Identity) -> str:
    """Say in which parts two identities differ; empty if they do not."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} is {theirs.get(name)!r} and not {ours.get(name)!r}" for name in names)


class LineWorker:
    """Answers lines of batches that other servers run."""

    def __init__(
        self, client: EngineClient, config: ServerWiring, endpoints: Iterable[Endpoint]
    ) -> None:
        self._client = client
        self._identity = WorkerIdentity(config)
        self._shares_prompts = config.share_prompts
        self._endpoints = {endpoint.path: endpoint for endpoint in endpoints}

    def status(self) -> WorkerStatus:
        """Return what this server is. Raises EngineUnavailable while it answers nothing."""
        status = self._ready()
        return WorkerStatus(
            instance=self._identity.instance,
            identity=self._identity.now(status),
            num_slots=status.num_slots,
            max_waiting=status.max_waiting,
            running=status.running,
            waiting=status.waiting,
        )

    async def answer(self, body: bytes) -> Response:
        """Return the stream of answers. Raises InvalidRequest, and EngineUnavailable."""
        asked = await parsed(parse_lines, body)
        ours = self._identity.now(self._ready())
        if different := differences(ours, asked.identity):
            raise InvalidRequest(f"identity: {different}", "identity")
        return EventStream(self._events(asked))

    def _ready(self) -> Status:
        status = self._client.status
        if status is None or status.state != "ready":
            raise EngineUnavailable("the engine takes no lines now")
        return status

    async def _events(self, asked: LinesRequest) -> AsyncGenerator[bytes, None]:
        alive = frame([_encode(LineAnswer())])
        yield alive
        owner = RequestOwner(
            *(asked.share, asked.weight, asked.priority, True, asked.created_unix),
            prompts_of="" if self._shares_prompts else asked.share,
        )
        endpoint = self._endpoints[asked.url]
        running = {asyncio.create_task(_answer(endpoint, line, owner)) for line in asked.lines}
        try:
            while running:
                ended, running = await asyncio.wait(
                    running, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
                )
                yield frame([task.result() for task in ended]) if ended else alive
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _answer(endpoint: Endpoint, line: WorkerLine, owner: RequestOwner) -> bytes:
    try:
        body = await endpoint.answer_whole(line.body.encode(), line.id, owner)
        return _encode(LineAnswer(line.id, msgspec.Raw(body)))
    except SRMError as error:
        return _encode(LineAnswer(line.id, refusal=refusal(line.id, error)))


def routes(worker: LineWorker, max_body_bytes: int) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()

    @router.get("/v1/worker")
    async def status() -> Response:
        return json_reply(worker.status())

    @router.post("/v1/worker/lines")
    async def answer(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        return WhileConnected(lambda: worker.answer(body))

    return router
