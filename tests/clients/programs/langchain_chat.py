"""LangChain's chat model; prints what it returned as JSON. Argument: the URL."""

import json
import sys

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(
    base_url=f"{sys.argv[1]}/v1", api_key="none", model="demo", temperature=0, max_tokens=32
)
messages = [("human", "Pia has 25 shells and sells 4 of them. How many shells are left?")]
whole = chat.invoke(messages)
found = {
    "whole": whole.content,
    "usage": whole.usage_metadata,
    "streamed": "".join(part.content for part in chat.stream(messages)),
}
print(json.dumps(found))
