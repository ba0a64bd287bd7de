"""POST /v1/completions: from a body to a generation.

Parameters that are not honoured are refused in `server.schema`; all that reach this are honoured.
"""

from __future__ import annotations

from functools import partial

from starlette.responses import Response

from srm.engine.client.client import EngineClient
from srm.engine.messages import count_alternatives
from srm.errors import InvalidRequest
from srm.server.dialects.completions.format import CompletionFormat
from srm.server.dialects.completions.models import Models
from srm.server.generation.constraints import Constraints
from srm.server.generation.engine_request import RequestOwner, of_current_request
from srm.server.generation.generation import Generation, Save
from srm.server.generation.prompts import GivenState, encode_prompts
from srm.server.generation.states import States
from srm.server.http.bodies import parsed
from srm.server.http.request_log import note_not_enforced
from srm.server.reply.responder import Endpoint, Responder
from srm.server.schema.completion_request import (
    PROMPT_FORMS,
    CompletionRequest,
    ForkRequest,
    parse_completion,
    parse_fork,
)
from srm.server.schema.completion_response import (
    Choice,
    Completion,
    Counted,
    Packed,
    PromptLogprob,
    Samples,
)
from srm.server.schema.openapi import BodySchema, Operation
from srm.server.schema.sampling_fields import NEUTRAL
from srm.server.schema.structured_outputs import ConstraintSource
from srm.server.schema.verify import VERIFY_FORMS
from srm.server.text.text import Text

_QUESTION = "Question: Ava has 6 boxes with 7 pears each. How many pears is that in all?\nAnswer:"
_EXAMPLES = {
    "One completion": {"prompt": _QUESTION, "max_tokens": 64, "temperature": 0},
    "A thousand samples, counted": {
        "prompt": _QUESTION,
        "max_tokens": 64,
        "n": 1000,
        "seed": 1,
        "return": "counts",
    },
    "Samples until 10 match": {
        "prompt": _QUESTION,
        "max_tokens": 64,
        "n": 1000,
        "until": {"match": r"#### (\d+)", "count": 10},
        "return": "counts",
        "count_by": "group",
    },
    "A thousand samples, scored": {
        "prompt": _QUESTION,
        "max_tokens": 64,
        "n": 1000,
        "verify": {"match": r"####\s*([-$0-9.,]*[0-9])", "number": 42},
        "return": "counts",
        "count_by": "score",
    },
    "A stream": {"prompt": _QUESTION, "max_tokens": 64, "stream": True},
}
OPERATIONS = (
    Operation("POST", "/v1/completions",
              "Completions of one or many prompts, whole or as a stream.", Completion,
              body=BodySchema(CompletionRequest, {"prompt": PROMPT_FORMS, "verify": VERIFY_FORMS},
                              NEUTRAL, _EXAMPLES),
              events=Completion, parts=(Choice, PromptLogprob, Packed, Samples, Counted),
              errors=(404, 409, 504)),
    Operation("POST", "/v1/completions/{completion_id}/fork",
              "Completions that go on from where a running one stands.", Completion,
              body=BodySchema(ForkRequest, {"prompt": PROMPT_FORMS, "verify": VERIFY_FORMS},
                              NEUTRAL),
              parameters={"completion_id": "The id of a running completion, chat or response."},
              events=Completion, parts=(Choice, PromptLogprob, Packed, Samples, Counted),
              errors=(404, 409, 504)),
)  # fmt: skip


class Completions(Endpoint):
    """Answers completion requests for one model."""

    path = "/v1/completions"
    id_prefix = "cmpl-"

    def __init__(
        self,
        client: EngineClient,
        text: Text,
        models: Models,
        responder: Responder,
        states: States | None = None,
    ) -> None:
        """Without `states` requests that name one, or are to make one, are refused."""
        super().__init__(responder)
        self._client = client
        self._text = text
        self._models = models
        self._states = states
        self._constraints = Constraints(text)

    def close(self) -> None:
        """End the process that makes constraints."""
        self._constraints.close()

    async def begin(self, body: bytes, id: str, owner: RequestOwner) -> CompletionFormat:
        generation = await self.start(id, await parsed(parse_completion, body), owner)
        return CompletionFormat(generation)

    async def fork(self, body: bytes, completion_id: str) -> Response:
        """Return the reply to a body that goes on from a running sample of this completion, with
        the tokens that it has by now. Raises the RequestError to answer with."""
        request, owner = await parsed(parse_fork, body), of_current_request()
        which = completion_id, request.prompt_index, request.index, owner.share
        sample = await self._client.read_sample(*which)
        begun = GivenState(sample.token_ids, salt=str(sample.detail["salt"]))
        generation = await self.start(self.make_id(), request, owner, begun=begun)
        return await self._responder.respond(CompletionFormat(generation))

    async def start(
        self,
        id: str,
        request: CompletionRequest,
        owner: RequestOwner,
        source: ConstraintSource | None = None,
        earlier: GivenState | None = None,
        begun: GivenState | None = None,
        are_chats: bool = False,
    ) -> Generation:
        """Make a request ready to run; `source` says what completions are, in place of its fields.
        It goes on from `begun`, or from `earlier` if the one prompt begins with its tokens; with
        `are_chats` prompts must begin with those of its `state`. Raises the RequestError to answer
        with."""
        self._models.check(request.model)
        if owner.durable and request.priority:  # it would go ahead of other batches, or of people
            raise InvalidRequest(
                f"priority = {request.priority}: lines have the priority of their batch, "
                "so it must be left out of them, or 0",
                "priority",
            )
        self._check_fits(request)
        request = count_alternatives(request, self._text.model.vocab_size)
        begun, save = await self._with_states(request, owner, begun)
        prompts = await encode_prompts(request, self._text, begun, are_chats)
        if earlier is not None and prompts[0].startswith(earlier.token_ids):
            begun = earlier
        source, constraint = source or request.constraint_source(), ""
        if source is not None:
            constraint, not_enforced, _ = await self._constraints.make(source, owner)
            note_not_enforced(not_enforced)
        own = constraint, self._models.name, begun, save
        return Generation(id, request, prompts, self._text, owner, *own)

    async def _with_states(
        self, request: CompletionRequest, owner: RequestOwner, begun: GivenState | None
    ) -> tuple[GivenState | None, Save | None]:
        """Return the state that a request goes on from, and what makes those of its choices."""
        states, id = self._states, request.state
        asked = [name for name in ("state", "save_state", "save_at") if getattr(request, name)]
        if not asked:
            return begun, None
        if states is None:
            raise InvalidRequest(f"{asked[0]} is for `srm serve`, which keeps states", asked[0])
        saves = asked[-1] != "state"
        if saves and owner.durable:  # a line that is sent again would make others
            raise InvalidRequest(f"{asked[-1]} is not for lines of a batch", asked[-1])
        begun = begun if id is None else await states.given(id, owner, request.refeed)
        save = partial(states.make_all, owner=owner, given=begun)
        return begun, save if saves else None

    def _check_fits(self, request: CompletionRequest) -> None:
        """Refuse what the engine could not take even when idle: a retry would not help."""
        status = self._client.status
        samples = request.num_samples
        if status is not None and len(request.prompt) * samples > status.max_waiting:
            name = "n" if samples == request.n else "best_of"
            raise InvalidRequest(
                f"{name} = {samples} of {len(request.prompt)} prompts: this server takes at most "
                f"max_waiting = {status.max_waiting} completions at once",
                name,
            )
