"""LangChain's chat model: two turns, and a prompt beyond the context; prints JSON.

Arguments: the URL and the model.
"""

import json
import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(
    base_url=f"{sys.argv[1]}/v1", api_key="none", model=sys.argv[2], temperature=0, max_tokens=16
)
first = chat.invoke([("human", "How many are 2 hats and 3 hats?")])
second = chat.invoke([
    ("human", "How many are 2 hats and 3 hats?"), first, ("human", "And 3 hats more?")
])  # fmt: skip
try:
    chat.invoke([("human", "hats " * 5_000)])
    error = ""
except ContextOverflowError as refused:
    error = str(refused)
print(json.dumps({"answers": [first.content, second.content], "error": error}))
