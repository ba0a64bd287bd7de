"""SGLang's native routes: generation with everything about a reply in `meta_info`, and what its
trainers and routers ask beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from srm.engine.client.client import EngineClient
from srm.engine.messages import Running
from srm.errors import EngineUnavailable, InvalidRequest
from srm.server.dialects.rollouts.control import Action, Nothing, TrainerControl, add_actions
from srm.server.dialects.rollouts.requests import (
    GENERATE_NEUTRAL,
    INPUT_FORMS,
    TEXT_FORMS,
    AskedToGenerate,
    GenerateRequest,
    parse_generate,
)
from srm.server.dialects.rollouts.vllm import StartGeneration
from srm.server.generation.detokenize import ChoicePart, join
from srm.server.generation.engine_request import RequestOwner
from srm.server.generation.generation import Generation
from srm.server.http.bodies import parsed
from srm.server.reply.format import Format
from srm.server.reply.responder import Endpoint, Responder
from srm.server.reply.scores import Columns, ScoreWriter, encode_numbers
from srm.server.schema.openapi import BodySchema, Operation, Router
from srm.server.schema.validation import Fields, naming

_SCORE = {"type": "array", "items": {"type": ["number", "null"]}}
ScoresJson = Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": _SCORE})]
TopScoresJson = Annotated[
    Raw,
    Meta(
        extra_json_schema={"type": "array", "items": {"type": "array", "items": _SCORE}},
    ),
]


class LabelSpan(msgspec.Struct):
    """Tokens of a completion that the same weights made."""

    version: str
    """What their trainer calls these weights, else their number."""
    start: int
    end: int


class FinishedBy(msgspec.Struct, omit_defaults=True):
    type: str
    """`stop`, `length` or `abort`."""
    matched: int | str | UnsetType | None = UNSET
    """The stop string or token, of `stop`."""
    length: int | UnsetType = UNSET
    """Tokens, of `length`."""
    message: str | UnsetType = UNSET
    """Why, of `abort`."""


class MetaInfo(msgspec.Struct, kw_only=True):
    id: str
    finish_reason: FinishedBy | None
    """Null in all events of a completion but the last."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose state was kept from an earlier request."""
    weight_version: str
    """What their trainer calls the weights of the last token, else their number."""
    weight_versions: list[LabelSpan]
    """Which weights made which of the tokens."""
    output_token_logprobs: ScoresJson | UnsetType = UNSET
    """For each token its log-probability, its id and null; with `return_logprob`."""
    output_top_logprobs: TopScoresJson | UnsetType = UNSET
    """For each token a list of such triples, of the likeliest tokens in its place."""
    output_token_ids_logprobs: TopScoresJson | UnsetType = UNSET
    """The same of the tokens that `token_ids_logprob` names."""
    input_token_logprobs: ScoresJson | UnsetType = UNSET
    """The same of the prompt's tokens from `logprob_start_len` on; the first has no score."""
    input_top_logprobs: TopScoresJson | UnsetType = UNSET
    """Null for the first of these, then a list for each."""
    input_token_ids_logprobs: TopScoresJson | UnsetType = UNSET
    """The same of the tokens that `token_ids_logprob` names."""


class GeneratedText(msgspec.Struct, kw_only=True):
    """A completion, in an event all of it so far. Several prompts or samples are a list of them."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    """Which completion it is, in events and lists."""


class TripleScores(ScoreWriter):
    """Writes triples of log-probability, id and null; of the likeliest tokens, a list of them."""

    def _before(self, token: int) -> bytes:
        return b",%d,null]" % token

    def _entries(self, scored: Columns, num_top: int) -> list[tuple[bytes, bytes]]:
        token_ids, logprobs, top_ids, top_logprobs = scored
        width = len(top_ids) // max(len(token_ids), 1)
        own = self._triples(token_ids, logprobs)
        tops = self._triples(top_ids, top_logprobs)
        rows = []
        for place, triple in enumerate(own):
            shown = zip(tops[place * width :][:num_top], top_ids[place * width :], strict=False)
            rows.append((triple, b"[%b]" % b",".join(top for top, id in shown if id >= 0)))
        return rows

    def _triples(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> list[bytes]:
        numbers = encode_numbers(logprobs)
        return [
            b"[" + number + self._begin[token]
            for number, token in zip(numbers, token_ids, strict=True)
        ]

    def _join(self, entries: Sequence[tuple[bytes, bytes]], _offsets: Sequence[int]) -> bytes:
        return b"[%b]" % b",".join(triple for triple, _ in entries)

    def _join_one(self, entry: tuple[bytes, bytes], _offset: int) -> bytes:
        return b"[%b]" % entry[0]


SENT_GROWTH = 16
"""Events have a completion anew when it has grown by one part in so many, so that sending all of it
again and again takes a multiple of its length, and not its square."""


class _Written:
    """What has come of one completion."""

    def __init__(self) -> None:
        self.parts: list[ChoicePart] = []
        self.num_tokens = self.num_sent = 0
        self.scores = bytearray()
        """The triple of each token, with a comma before it."""
        self.tops = bytearray()

    @property
    def has_grown(self) -> bool:
        """Whether an event is worth it."""
        return (self.num_tokens - self.num_sent) * SENT_GROWTH >= max(self.num_sent, 1)

    def joined(self) -> ChoicePart:
        """Return all that has come, which is sent now."""
        self.parts = [join(self.parts)]
        self.num_sent = self.num_tokens
        return self.parts[0]


class GeneratedFormat(Format):
    """A GeneratedText, or a list of them."""

    scores_kind = TripleScores
    may_share_events = False

    def __init__(
        self, generation: Generation, client: EngineClient, asked: AskedToGenerate
    ) -> None:
        super().__init__(generation)
        self._client = client
        self._names: Mapping[str, str] = {**asked.names, "prompt_token_ids": asked.names["prompt"]}
        self._is_list = asked.is_list or generation.num_choices > 1
        self._written: dict[int, _Written] = {}  # of streams, by choice
        self._of_prompts: dict[int, tuple[Raw, Raw | UnsetType]] = {}

    def field_of(self, name: str) -> str:
        return self._names.get(name, name)

    def make_choice(self, part: ChoicePart, is_event: bool) -> GeneratedText:  # noqa: ARG002
        written = _Written()
        self._add(part, written)
        return self._render(written)

    def _add(self, part: ChoicePart, written: _Written) -> None:
        written.parts.append(part)
        written.num_tokens += part.num_tokens
        if (num_top := self.request.logprobs) is not None:
            for own, tops in self.scores.entries(part.tokens, num_top):
                written.scores += b"," + own
                written.tops += b"," + tops

    def _render(self, written: _Written) -> GeneratedText:
        part = written.joined()
        index, label = part.index if self._is_list else UNSET, self._client.label
        generation = self.generation
        place = part.index // self.request.n
        cached = generation.stream.cached_tokens[place] if generation.stream else 0
        spans = [
            LabelSpan(label(span.version), span.start, span.end) for span in part.versions or ()
        ]
        last = generation.weights_version
        if last is None and self._client.status is not None:  # nothing was made
            last = self._client.status.weights_version
        meta = MetaInfo(
            id=generation.id,
            finish_reason=_finished_by(part),
            prompt_tokens=generation.prompts[place].num_tokens,
            completion_tokens=part.num_tokens,
            cached_tokens=cached,
            weight_version=spans[-1].version if spans else label(last or 0),
            weight_versions=spans,
        )
        others = "token_ids_logprobs" if self.request.logprob_token_ids else "top_logprobs"
        if self.request.logprobs is not None:
            meta.output_token_logprobs = Raw(b"[" + written.scores[1:] + b"]")
            if self.request.logprobs:
                setattr(meta, f"output_{others}", Raw(b"[" + written.tops[1:] + b"]"))
        if self.request.prompt_logprobs is not None:
            meta.input_token_logprobs, tops = self._scores_of_prompt(place)
            setattr(meta, f"input_{others}", tops)
        ids = memoryview(part.token_ids).cast("i").tolist()
        return GeneratedText(text=part.text, output_ids=ids, meta_info=meta, index=index)

    def _scores_of_prompt(self, place: int) -> tuple[Raw, Raw | UnsetType]:
        if place not in self._of_prompts:
            prompt, num_top = self.generation.prompts[place], self.request.logprobs or 0
            start, ids = self.request.prompt_logprobs_start - 1, memoryview(prompt.token_ids)
            unscored = ids.cast("i")[start : prompt.num_unscored].tolist()  # one
            entries = [(b"[null,%d,null]" % token, b"null") for token in unscored]
            own, tops = zip(*entries, *self.scores.entries(prompt.rest, num_top), strict=True)
            shown = Raw(b"[%b]" % b",".join(tops)) if num_top else UNSET
            self._of_prompts[place] = Raw(b"[%b]" % b",".join(own)), shown
        return self._of_prompts[place]

    def events(self, parts: list[ChoicePart]) -> list[list[Any]]:
        choices = []
        for part in parts:
            written = self._written.setdefault(part.index, _Written())
            self._add(part, written)
            if part.finish_reason:
                del self._written[part.index]
            if part.finish_reason or written.has_grown:
                choices.append(self._render(written))
        return [choices] if choices else []

    def envelope(self, fields: dict[str, Any], is_event: bool) -> Any:
        choices = fields["choices"]
        return choices[0] if is_event or not self._is_list else choices


def _finished_by(part: ChoicePart) -> FinishedBy | None:
    match part.finish_reason:
        case None:
            return None
        case "length":
            return FinishedBy("length", length=part.num_tokens)
        case "abort":
            return FinishedBy("abort", message="it was ended by /abort_request")
        case reason:
            return FinishedBy(reason, matched=part.stop_reason)


class GenerateEndpoint(Endpoint):
    """Answers as SGLang's /generate, for one model."""

    path = "/generate"
    id_prefix = "gen-"

    def __init__(self, start: StartGeneration, client: EngineClient, responder: Responder) -> None:
        super().__init__(responder)
        self._start, self._client = start, client

    async def begin(self, body: bytes, id: str, owner: RequestOwner) -> GeneratedFormat:
        asked = await parsed(parse_generate, body)
        with naming(asked.names):
            generation = await self._start(id, asked.request, owner)
        return GeneratedFormat(generation, self._client, asked)


class PauseGeneration(Fields, frozen=True, kw_only=True):
    """Body of POST /pause_generation, checked."""

    mode: Annotated[
        Literal["in_place", "abort", "retract"], Meta(description="in_place, abort or retract")
    ] = "in_place"
    """`in_place`: what runs goes on afterwards; `abort`: it ends, with its tokens so far;
    `retract`: it goes on, but new weights are fed all of its tokens again."""


class FlushQuery(Fields, frozen=True, kw_only=True):
    """The query of /flush_cache."""

    timeout: Annotated[float, Meta(ge=0, description="a number of at least 0")] = 0.0
    """No effect: nothing is waited for."""


class DiskRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /update_weights_from_disk, checked."""

    model_path: Annotated[str, Meta(min_length=1, max_length=4096, description="a folder's path")]
    """Model folder on the server's machine."""
    weight_version: (
        Annotated[
            str, Meta(min_length=1, max_length=128, description="a string of 1 to 128 characters")
        ]
        | None
    ) = None
    """What replies call these weights; by default their number."""
    abort_all_requests: bool = False
    """End all requests, each with its tokens so far, once the folder has been read; else they go
    on."""
    keep_pause: bool = True
    """Whether what is paused remains paused."""


DISK_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "load_format": ("auto", "safetensors"),
    "flush_cache": (True, False),
    "is_async": (False,),
    "torch_empty_cache": (True, False),
    "recapture_cuda_graph": (False,),
}


class AbortRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /abort_request, checked."""

    rid: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Value of `rid` of the requests to end."""
    abort_all: bool = False
    """End all but those of batches."""

    def check(self) -> None:
        if (self.rid is None) != self.abort_all:
            raise InvalidRequest("either rid or abort_all = true must be given", "rid")


class Changed(msgspec.Struct):
    success: bool
    message: str
    num_paused_requests: int = 0
    """Sequences that stand still."""


class WeightVersion(msgspec.Struct):
    weight_version: str
    """What their trainer calls the weights in use, else their number."""


class ModelInfo(msgspec.Struct, kw_only=True):
    model_path: str
    """Name of the served model."""
    tokenizer_path: str
    is_generation: bool = True
    weight_version: str


class VllmModel(msgspec.Struct, kw_only=True):
    model: str
    dtype: str
    """As torch writes it."""
    max_model_len: int
    logprobs_mode: str = "processed_logprobs"
    """They are those of the distribution after temperature and penalties."""
    max_logprobs: int
    """Most alternatives to a token that may be asked for."""


class VllmServed(msgspec.Struct, kw_only=True):
    model_config: VllmModel
    weight_transfer_config: None = None
    """Null: weights come in folders."""


class ServerInfo(msgspec.Struct, kw_only=True):
    """What trainers and routers of both servers look up."""

    vllm_config: VllmServed
    model_path: str
    served_model_name: str
    dtype: str
    max_model_len: int
    max_running_requests: int
    """Sequences that run at once."""
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    num_gpus: int = 1
    disaggregation_mode: str = "null"
    enable_memory_saver: bool = False
    weight_version: str


class Load(msgspec.Struct):
    num_running_reqs: int
    """Sequences that have a slot."""
    num_waiting_reqs: int
    """Sequences that wait for one."""


class Loads(msgspec.Struct):
    loads: list[Load]


class Alive(msgspec.Struct):
    status: Literal["ready"]


_EXAMPLES: dict[str, dict[str, Any]] = {
    "Four tokens": {"input_ids": [0, 5], "sampling_params": {"max_new_tokens": 4}},
    "A group": {"text": "Question:", "sampling_params": {"n": 8}, "return_logprob": True},
}
OPERATIONS = (
    Operation("POST", "/generate", "Completions as SGLang has them.", GeneratedText,
              events=GeneratedText, may_be_list=True,
              body=BodySchema(GenerateRequest, {"text": TEXT_FORMS, "input_ids": INPUT_FORMS},
                              GENERATE_NEUTRAL, _EXAMPLES), errors=(404, 409, 504)),
    Operation("POST", "/pause_generation", "Let all sequences stand still where they are.",
              Changed, body=BodySchema(PauseGeneration), errors=(403, 404)),
    Operation("POST", "/continue_generation", "Let them go on.", Changed,
              body=BodySchema(Nothing), errors=(403, 404)),
    Operation("POST", "/update_weights_from_disk", "Go on with the weights in a folder, at once.",
              Changed, body=BodySchema(DiskRequest, {}, DISK_NEUTRAL), errors=(403, 404, 409, 507)),
    Operation("POST", "/abort_request", "End requests, each with its tokens so far.", Changed,
              body=BodySchema(AbortRequest), errors=(403, 404)),
    *(Operation(method, "/flush_cache", "Forget the kept states of prompts.", Changed,
                query=FlushQuery, errors=(400, 403, 404)) for method in ("GET", "POST")),
    Operation("GET", "/get_weight_version", "What the weights in use are called.", WeightVersion),
    *(Operation("GET", path, "The served model.", ModelInfo)
      for path in ("/model_info", "/get_model_info")),
    *(Operation("GET", path, "What trainers and routers look up.", ServerInfo)
      for path in ("/server_info", "/get_server_info")),
    Operation("GET", "/health_generate", "Completions would be answered.", Alive),
    Operation("GET", "/v1/loads", "How many sequences run and wait.", Loads),
)  # fmt: skip


class SglangRoutes:
    """Answers what SGLang's trainers and routers ask, besides completions."""

    def __init__(
        self, control: TrainerControl, model_name: str, check_ready: Callable[[], object]
    ) -> None:
        """`check_ready` raises EngineUnavailable while completions would not be answered."""
        self._control, self._model_name, self._check_ready = control, model_name, check_ready

    async def info(self, _: Nothing) -> ServerInfo:
        """Raises EngineUnavailable while no engine answers."""
        status, name = await self._control.status(), self._model_name
        dtype = status.arithmetic.split()[1] if " " in status.arithmetic else "float32"
        model = VllmModel(
            model=name,
            dtype=f"torch.{dtype}",
            max_model_len=status.n_ctx,
            max_logprobs=status.max_logprobs,
        )
        return ServerInfo(
            vllm_config=VllmServed(model_config=model),
            model_path=name,
            served_model_name=name,
            dtype=dtype,
            max_model_len=status.n_ctx,
            max_running_requests=status.num_slots,
            weight_version=self._control.label(status),
        )

    async def model(self, _: Nothing) -> ModelInfo:
        """Raises EngineUnavailable while no engine answers."""
        name, version = self._model_name, (await self.version(_)).weight_version
        return ModelInfo(model_path=name, tokenizer_path=name, weight_version=version)

    async def version(self, _: Nothing) -> WeightVersion:
        """Raises EngineUnavailable while no engine answers."""
        return WeightVersion(self._control.label(await self._control.status()))

    async def loads(self, _: Nothing) -> Loads:
        """Raises EngineUnavailable while no engine answers."""
        status = await self._control.status()
        return Loads([Load(status.running, status.waiting)])

    async def alive(self, _: Nothing) -> Alive:
        """Raises EngineUnavailable unless completions would be answered."""
        self._check_ready()
        return Alive("ready")

    async def pause(self, asked: PauseGeneration) -> Changed:
        """Raises EngineUnavailable."""
        await self._control.pause(refeeds=asked.mode == "retract")
        if asked.mode == "abort":
            await self._control.end()
        return Changed(True, "paused", (await self._control.status()).running)

    async def resume(self, _: Nothing) -> Changed:
        """Raises EngineUnavailable."""
        await self._control.resume()
        return Changed(True, "resumed")

    async def change(self, asked: DiskRequest) -> Changed:
        """Raises the SRMError to answer with; then the weights have not changed. The reply says it
        if a pause cannot be ended: after an error they would be sent again."""
        control, before = self._control, await self._control.status()
        paused = before.running if before.paused else 0
        running: Running = "abort" if asked.abort_all_requests else "continue"
        with naming({"path": "model_path"}):
            version = await control.change(asked.model_path, running, asked.weight_version or "")
        message = f"weights version {version} is in use"
        try:
            if not asked.keep_pause:
                await control.resume()
                paused = 0
        except EngineUnavailable as error:
            message += f", and sequences may still be paused: {error.message}"
        return Changed(True, message, paused)

    async def end(self, asked: AbortRequest) -> Changed:
        """Raises EngineUnavailable."""
        count = await self._control.end(None if asked.rid is None else [asked.rid])
        return Changed(True, f"ended {count} requests")

    async def flush(self, _: FlushQuery) -> Changed:
        """Raises EngineUnavailable."""
        await self._control.drop_prefixes()
        return Changed(True, "kept states are forgotten")


def add_routes(router: Router, served: SglangRoutes) -> None:
    """Add the routes of this module but for the one that generates."""
    actions: dict[str, Action] = {
        "/pause_generation": served.pause,
        "/continue_generation": served.resume,
        "/update_weights_from_disk": served.change,
        "/abort_request": served.end,
        "/flush_cache": served.flush,
        "/get_weight_version": served.version,
        "/health_generate": served.alive,
        "/v1/loads": served.loads,
        **dict.fromkeys(("/model_info", "/get_model_info"), served.model),
        **dict.fromkeys(("/server_info", "/get_server_info"), served.info),
    }
    add_actions(router, OPERATIONS, actions)
