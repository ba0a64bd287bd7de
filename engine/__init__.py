"""Tokens in, tokens out. No HTTP, no text, no torch. Importing the package costs nothing.

`from engine import Engine, SamplingParams` is the Python API; its file is read when asked for.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Engine": "engine.python.offline",
    "SamplingParams": "engine.messages",
    "Completion": "engine.python.request_output",
    "Generated": "engine.python.request_output",
    "RequestError": "engine.errors",
    "ConfigError": "engine.errors",
    "CheckpointError": "engine.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
