"""What a model folder has besides its weights, for `transformers` to read it.

The classes are files of `training/huggingface/`, which are copied and never imported here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from srm.engine.config import GENERATION, ModelConfig
from srm.errors import UNDECODABLE, CheckpointError, in_words
from srm.files import read_file
from srm.tokenizer_file import DESCRIPTIONS, read_tokenizer

TEXT_FILES = ("tokenizer.json", *DESCRIPTIONS, "chat_template.jinja", GENERATION)
"""What a model folder may have besides weights and config.json."""
CLASSES = Path(__file__).resolve().parents[2] / "training" / "huggingface"
"""The same place in a source tree and in an installed package."""
CLASS_FILES = ("configuration_srm.py", "mixers_srm.py", "modeling_srm.py", "units_srm.py")


def transformers_files(
    config: ModelConfig, texts: dict[str, bytes], tokenizer: Path | None
) -> dict[str, bytes]:
    """Return `config.json`, the classes and, with a tokenizer, `tokenizer_config.json`, by name.
    `texts` are those of TEXT_FILES that the model has."""
    described = msgspec.to_builtins(config) | {
        "model_type": "srm",
        "architectures": ["SRMForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_srm.SRMConfig",
            "AutoModelForCausalLM": "modeling_srm.SRMForCausalLM",
        },
        "dtype": "float32",
        "pad_token_id": config.end_id,
        "tie_word_embeddings": False,
    }
    files = {name: read_file(CLASSES / name) for name in CLASS_FILES}
    files["config.json"] = _in_lines(described)
    if tokenizer is not None:
        own = _read_description(texts.get("tokenizer_config.json", b"{}"))
        files["tokenizer_config.json"] = _in_lines(_describe(config, tokenizer) | own)
    return files


def _describe(config: ModelConfig, tokenizer: Path) -> dict[str, Any]:
    """Return what `tokenizer_config.json` has to say of a tokenizer."""
    added = read_tokenizer(tokenizer).get_added_tokens_decoder()
    ends = {"bos_token": config.bos_token_id, "eos_token": config.end_id}
    ends["pad_token"] = config.end_id  # as in the published code
    special = {name: added[token].content for name, token in ends.items() if token in added}
    return special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.n_ctx,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }


def _read_description(content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except UNDECODABLE as error:
        raise CheckpointError(f"tokenizer_config.json: {in_words(error)}") from None


def _in_lines(value: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
