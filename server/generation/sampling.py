"""What a completion request says of sampling, as the engine takes it."""

from __future__ import annotations

from engine.errors import InvalidRequest
from engine.messages import SamplingParams
from server.generation.sampling_edits import edit_params
from server.schema.completion_request import CompletionRequest
from server.text.text import Text


def sampling_params(request: CompletionRequest, text: Text) -> SamplingParams:
    """How the engine is to sample; the seed is still to be set. Raises InvalidRequest."""
    limits = text.model
    for token in request.stop_token_ids:
        if token >= limits.vocab_size:
            raise InvalidRequest(
                f"stop_token_ids has {token}; ids go from 0 to {limits.vocab_size - 1}",
                "stop_token_ids",
            )
    return SamplingParams(
        max_tokens=min(request.max_tokens, limits.n_ctx),
        n=request.num_samples,
        temperature=request.temperature,
        top_k=min(max(request.top_k, 0), limits.vocab_size),
        top_p=request.top_p,
        min_p=request.min_p,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logprobs=_alternatives(request),
        prompt_logprobs=_prompt_alternatives(request),
        **edit_params(request, text, request.max_tokens),
    )


def _alternatives(request: CompletionRequest) -> int | None:
    """As many as are asked for; candidates are ranked by what they were sampled with."""
    is_ranked = request.num_samples > request.n
    return 0 if request.logprobs is None and is_ranked else request.logprobs


def _prompt_alternatives(request: CompletionRequest) -> int | None:
    """As many as the two places that show scores of prompts want, or None."""
    echoed = request.logprobs if request.echo else None
    return max((k for k in (request.prompt_logprobs, echoed) if k is not None), default=None)
