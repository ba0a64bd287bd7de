"""Names our route or field beside each of another server, for the 404 or 400 that answers it."""

from __future__ import annotations

_FOLDERS = (
    "weights are read from folders: write one and send POST /update_weights "
    '{"weight_dir": …} or POST /update_weights_from_disk {"model_path": …}'
)
_LORA = "merge the adapter into the weights and change to that folder by POST /update_weights"
_PAUSE = "POST /pause and POST /resume; there is no memory to free, a state has a few KiB"
_NO_EMBEDDINGS = "this server has no embeddings; POST /v1/completions scores texts"
ROUTES: dict[str, str] = {
    **dict.fromkeys(
        (
            *("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"),
            *("/init_broadcaster", "/init_communicator", "/update_named_param"),
            *("/init_weights_update_group", "/update_weights_from_distributed"),
            *("/update_weights_from_tensor", "/update_weights_from_ipc", "/collective_rpc"),
            *("/batch_update_named_params", "/close_communicator", "/fetch_weights"),
            *("/areal_update_weights", "/update_weight_version"),
        ),
        _FOLDERS,
    ),
    **dict.fromkeys(
        (
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
            *("/load_lora_adapter", "/unload_lora_adapter"),
        ),
        _LORA,
    ),
    **dict.fromkeys(
        (
            *("/sleep", "/wake_up", "/is_sleeping"),
            *("/release_memory_occupation", "/resume_memory_occupation"),
        ),
        _PAUSE,
    ),
    "/areal_pause_generation": "POST /pause_generation does it",
    "/areal_continue_generation": "POST /continue_generation does it",
    "/weight_info": "GET /get_weight_version says it, and GET /v1/admin/state on admin_port",
    "/get_load": "GET /v1/loads says it",
    "/get_loads": "GET /v1/loads says it",
    "/get_server_load": "GET /v1/loads says it",
    "/load": "GET /v1/loads says it",
    **dict.fromkeys(
        (
            *("/v1/embeddings", "/embeddings", "/pooling", "/encode", "/v1/moderations"),
            *("/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
        ),
        _NO_EMBEDDINGS,
    ),
    "/v1/conversations": "previous_response_id of POST /v1/responses goes on from a stored one",
    "/v1/responses/compact": "no turn is dropped here: begin anew with the items that you choose",
    "/start_profile": "`srm bench` measures where the time goes",
    "/stop_profile": "`srm bench` measures where the time goes",
    "/destroy_weights_update_group": _FOLDERS,
    "/api/v1/client/config": "this is Tinker's API; POST /inference/v1/generate samples here",
    "/api/generate": "this is Ollama's API; POST /v1/completions does it",
    "/api/chat": "this is Ollama's API; POST /v1/chat/completions does it",
}
"""By path, and by no path that this server answers."""
FIELDS: dict[str, str] = {
    "logprob_token_ids": "POST /v1/completions and /v1/chat/completions have it; in POST /generate "
    "token_ids_logprob is its name",
    "token_ids_logprob": "logprob_token_ids is its name here, and this that of POST /generate",
    "logprob_start_len": "prompt_logprobs_start is its name here, and counts one more",
    "prompt_logprobs_last_n": "prompt_logprobs_start = -n is its name here",
    "max_new_tokens": "max_tokens is its name here, and max_new_tokens that of POST /generate",
    "sampling_seed": "seed is its name here, and sampling_seed that of POST /generate",
    "input_ids": "prompt takes token ids, and so does input_ids of POST /generate",
    "sampling_params": "they are fields of the request; POST /inference/v1/generate takes them so",
    "return_logprob": "logprobs = 0 does it, and return_logprob of POST /generate",
    "top_logprobs_num": "logprobs is its name here",
    "rid": "request_id is its name here, and rid that of POST /generate",
    "best_of_n": "best_of is its name here",
    "required_prefix_token_ids": "POST /v1/chat/completions takes it; here ids are the prompt",
    "prompt_token_ids": "POST /v1/completions takes token ids as prompt; messages may have it",
    "generation_token_ids": "messages of POST /v1/chat/completions have it",
    "return_prompt_text": "POST /detokenize makes text of prompt_token_ids",
    "lora_path": _LORA,
    "weight_version": "cache_salt keeps the states of a policy apart; replies say weights_version",
}  # fmt: skip
"""By name, where the request has no field that is called so."""


def here(path: str) -> str:
    """Return what does here what another server's route of this path does; empty: nothing."""
    return ROUTES.get(path, "")
