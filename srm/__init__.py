"""A batch inference server for Structured Recurrent Mixers. Importing the package costs nothing.

`from srm import Engine, SamplingParams` is the Python API; its file is read when asked for.
Type checkers and editors read `__init__.pyi`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.3.0"
"""The version of wheel, server, image and tag."""
_HOMES = {
    "Engine": "srm.engine.python.offline",
    "SamplingParams": "srm.engine.messages",
    "State": "srm.engine.python.state",
    "Until": "srm.engine.python.until",
    "Tree": "srm.engine.tree_search",
    "TreeNode": "srm.engine.tree_search",
    "GenerateProgress": "srm.engine.python.offline",
    "Completion": "srm.engine.python.request_output",
    "CompletionPart": "srm.engine.python.request_output",
    "TokenScores": "srm.engine.python.request_output",
    "Generated": "srm.engine.python.request_output",
    "json_constraint": "srm.engine.constraints.constraint",
    "regex_constraint": "srm.engine.constraints.constraint",
    "choice_constraint": "srm.engine.constraints.constraint",
    "lark_constraint": "srm.engine.constraints.constraint",
    "RequestError": "srm.errors",
    "ConfigError": "srm.errors",
    "CheckpointError": "srm.errors",
    "EngineError": "srm.errors",
}
__all__ = [*_HOMES]  # noqa: PLE0604 - its names are known


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'srm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
