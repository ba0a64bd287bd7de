"""LangChain's chat model: a reply, streamed too, a second turn, and a prompt beyond the context.

Prints what it returned as JSON. Argument: the URL.
"""

import json
import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(
    base_url=f"{sys.argv[1]}/v1", api_key="none", model="demo", temperature=0, max_tokens=16
)
question = ("human", "How many are 2 hats and 3 hats?")
first = chat.invoke([question])
second = chat.invoke([question, first, ("human", "And 3 hats more?")])
reply = {
    "usage": first.usage_metadata,
    "streamed": "".join(part.content for part in chat.stream([question])),
    "answers": [first.content, second.content],
    "error": "",
}
try:
    chat.invoke([("human", "hats " * 5_000)])
except ContextOverflowError as refused:
    reply["error"] = str(refused)
print(json.dumps(reply))
