"""Tables of docs/: which fields and routes of vLLM there are here.

The names are those of vLLM's request classes and routers, typed off its source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from srm.server.dialects.chat.request import ChatRequest
from srm.server.routes.app import OPERATIONS
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.sampling_fields import NEUTRAL
from srm.server.schema.validation import Fields, hints_of

Row = list[str | None]

_SHARED = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed
    stop stream stream_options temperature top_p user use_beam_search top_k min_p
    repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
    stream_interval
""".split()
VLLM_COMPLETIONS = ["prompt", "suffix", "prompt_embeds", *_SHARED]
_OF_CHATS = """
    messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls
    reasoning_effort include_reasoning add_generation_prompt continue_final_message documents
    chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
""".split()
VLLM_CHATS = [*_OF_CHATS, *_SHARED]
VLLM_ROUTES = """
    /v1/completions /v1/chat/completions /v1/chat/completions/batch /v1/models /health /ping
    /version /metrics /tokenize
    /detokenize /tokenizer_info /get_world_size /v1/responses /v1/messages /v1/embeddings
    /v1/audio/transcriptions /v1/audio/translations /v1/realtime /classify /pooling /score /rerank
    /inference/v1/generate /v1/completions/render /v1/chat/completions/render /server_info /load
    /v1/load_lora_adapter /v1/unload_lora_adapter /pause /resume /is_paused /abort_requests
    /init_weight_transfer_engine /update_weights /reset_prefix_cache /sleep /wake_up /is_sleeping
    /collective_rpc /start_profile /stop_profile /scale_elastic_ep
""".split()


def fields() -> list[Row]:
    """By what becomes of them: those of completions and chats, and of one of them alone."""
    of_completions = _by_fate(VLLM_COMPLETIONS, CompletionRequest, NEUTRAL)
    of_chats = _by_fate(VLLM_CHATS, ChatRequest, NEUTRAL)
    rows: list[Row] = []
    for fate, ours in of_completions.items():
        theirs = of_chats[fate]
        both = [item for item in ours if item in theirs]
        for of, names in (("both", both), ("completions", ours), ("chats", theirs)):
            alone = names if of == "both" else [name for name in names if name not in both]
            rows += [[f"{fate}, {of}", "; ".join(alone)]] if alone else []
    return rows


def routes() -> list[Row]:
    ours = {operation.path for operation in OPERATIONS}
    there = " ".join(f"`{path}`" for path in VLLM_ROUTES if path in ours)
    missing = " ".join(f"`{path}`" for path in VLLM_ROUTES if path not in ours)
    return [["supported", there], ["404", missing]]


def shown(values: tuple[Any, ...]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values or (None,))


def _by_fate(
    names: list[str], kind: type[Fields], at_one_value: Mapping[str, tuple[Any, ...]]
) -> dict[str, list[str]]:
    known = hints_of(kind)
    neutral = [name for name in names if at_one_value.get(name)]
    return {
        "supported": [f"`{name}`" for name in names if name in known],
        "neutral value only": [f"`{name}`: {shown(at_one_value[name])}" for name in neutral],
        "unsupported": [f"`{name}`" for name in names if name not in {*known, *neutral}],
    }
