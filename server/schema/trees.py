"""Trees of samples: the body that asks for one, and what clients get of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from srm.engine.tree_search import Ends, Tree
from srm.errors import InvalidRequest
from srm.server.schema.completion_request import CompletionRequest, refuse_drawing
from srm.server.schema.completion_response import Usage
from srm.server.schema.openapi import reference
from srm.server.schema.sampling_fields import (
    AllowedTokens,
    Biases,
    CacheSalt,
    Probability,
    Seed,
    StateId,
    Temperature,
    TopK,
)
from srm.server.schema.states import prompt_of
from srm.server.schema.validation import Fields, checked, given_fields, require
from srm.server.schema.verify import MAX_PATTERN_LENGTH, Rule, rules_of


class TreeRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /v1/trees, checked."""

    prompt: str | bytes | None = None
    """Text or token ids; with `state`, what follows it."""
    tree: (
        Annotated[
            Tree,
            Meta(
                description="an object with at most branching, an integer from 1 to 1024, "
                "candidates, samples or likeliest, search, levels or best_first, and node_tokens, "
                "depth, width and budget, integers of at least 1"
            ),
        ]
        | None
    ) = None
    """How the tree grows."""
    split: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=MAX_PATTERN_LENGTH,
                description="a regular expression in RE2's syntax that some tokens match",
            ),
        ]
        | None
    ) = None
    """A node ends at a token in whose text this is found, such as the end of a line."""
    score: Literal["logprob", "mean_logprob", "verify"] = "logprob"
    """What the best nodes have most of: log-probability from the prompt on, its mean by token, or
    the score of `verify`. Of equal scores the higher mean is better."""
    verify: Annotated[Rule, Meta(description="a rule")] | None = None
    """Give each node a score, of the text from the prompt on."""
    stream: bool = False
    """Send nodes as server-sent events, as they come."""
    model: str | None = None
    """The served model."""
    state: StateId | None = None
    """Go on from this state."""
    refeed: bool = False
    """Feed the tokens of the state, if other weights made it."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to a text that follows no state."""
    temperature: Temperature = 1.0
    """Divides the logits; below 0.0001 is greedy."""
    top_p: Probability = 1.0
    """Keep the fewest likeliest tokens of this total probability, and ties."""
    top_k: TopK = 0
    """Keep this many of the likeliest tokens, and ties."""
    min_p: Probability = 0.0
    """Drop tokens below this fraction of the largest probability."""
    logit_bias: Biases = msgspec.field(default_factory=dict)
    """Added to these tokens' logits."""
    allowed_token_ids: AllowedTokens | None = None
    """The only tokens that are sampled."""
    ignore_eos: bool = False
    """Do not end at the end-of-text token."""
    seed: Seed | None = None
    """Makes the tree repeatable."""
    cache_salt: CacheSalt | None = None
    """Only states of prompts with the same salt are used."""

    @property
    def shape(self) -> Tree:
        """How the tree grows; by default a small one."""
        return self.tree or Tree()

    def check(self) -> None:
        self.shape.check()
        if self.refeed and self.state is None:
            raise InvalidRequest("refeed = true needs a state", "refeed")
        if (self.score == "verify") > (self.verify is not None):
            raise InvalidRequest("score = verify needs verify", "score")
        if self.shape.candidates == "likeliest":
            refuse_drawing(self, "candidates = likeliest", ["split"])

    def completion(self, split_ids: list[int]) -> CompletionRequest:
        """Return the request for a completion that is sampled as its nodes are."""
        names = {*TreeRequest.__struct_fields__} & {*CompletionRequest.__struct_fields__}
        given = {name: getattr(self, name) for name in names - {"prompt", "verify", "stream"}}
        prompt: Any = [b"" if self.prompt is None else self.prompt]
        request = CompletionRequest(prompt=prompt, stop_token_ids=split_ids, max_tokens=1, **given)
        request.check()
        return request


class TreeReplyNode(msgspec.Struct, kw_only=True):
    """A node; nodes come in the order of their ids."""

    id: int
    parent: int | None
    """Id of its parent; null of those that follow the prompt."""
    depth: int
    """Nodes from the prompt to this one."""
    text: str
    """Text of its own tokens; a character that is divided between nodes is replaced."""
    token_ids: list[int]
    logprobs: list[float]
    logprob: float
    """Sum over all tokens from the prompt on."""
    score: float | UnsetType = UNSET
    """Score by `verify`."""
    ends: Ends
    """stop: with the text; split: at a token that `split` is found in; length."""
    is_leaf: bool
    """Whether nothing may follow."""


class TreeReply(msgspec.Struct, kw_only=True):
    """The reply, and every event of a stream."""

    id: str
    object: Literal["tree"] = "tree"
    created: int
    """Unix time in seconds."""
    model: str
    nodes: list[Annotated[Raw, Meta(extra_json_schema=reference(TreeReplyNode))]]
    """Each a TreeReplyNode, encoded when it came."""
    usage: Usage | UnsetType = UNSET
    """In a stream only of the last event. Completion tokens are those computed."""
    system_fingerprint: str
    """Fingerprint of the weights that made its last nodes."""
    weights_version: int = 0
    """Version of these weights."""
    first_weights_version: int | UnsetType = UNSET
    """Version of the weights that made the first nodes, if it is another one."""


def parse_tree_request(body: bytes) -> TreeRequest:
    """Check the body of POST /v1/trees. Raises InvalidRequest naming field and value."""
    given = given_fields(body, TreeRequest, {})
    if "state" not in given:
        require(given, "prompt", "text or token ids")
    converted: dict[str, Any] = prompt_of(given)
    if "verify" in given:
        (converted["verify"],) = rules_of(given["verify"], 1)
    return checked(TreeRequest, given, converted, {})
