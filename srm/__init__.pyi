"""The names of `__init__.py` for type checkers and editors, which cannot follow its look-ups."""

from srm.engine.constraints.constraint import choice_constraint as choice_constraint
from srm.engine.constraints.constraint import json_constraint as json_constraint
from srm.engine.constraints.constraint import lark_constraint as lark_constraint
from srm.engine.constraints.constraint import regex_constraint as regex_constraint
from srm.engine.messages import SamplingParams as SamplingParams
from srm.engine.python.offline import Engine as Engine
from srm.engine.python.offline import GenerateProgress as GenerateProgress
from srm.engine.python.request_output import Completion as Completion
from srm.engine.python.request_output import CompletionPart as CompletionPart
from srm.engine.python.request_output import Generated as Generated
from srm.engine.python.request_output import TokenScores as TokenScores
from srm.engine.python.state import State as State
from srm.engine.python.until import Until as Until
from srm.engine.tree_search import Tree as Tree
from srm.engine.tree_search import TreeNode as TreeNode
from srm.errors import CheckpointError as CheckpointError
from srm.errors import ConfigError as ConfigError
from srm.errors import EngineError as EngineError
from srm.errors import RequestError as RequestError

__version__: str
