"""LangChain's OpenAI LLM; prints what it returned as JSON. Argument: the URL."""

import asyncio
import json
import sys

from langchain_core.prompts import PromptTemplate
from langchain_openai import OpenAI

common = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "model": "demo"}
llm = OpenAI(**common, temperature=0, max_tokens=48, max_retries=2)
asked = "Pia has 25 shells and sells 4 of them. How many shells are left?"
question = f"Question: {asked}\nAnswer:"
chain = PromptTemplate.from_template("Question: {question}\nAnswer:") | llm.bind(stop=["\n####"])
several = OpenAI(
    **common,
    **{"temperature": 2, "top_p": 0.95, "n": 3, "best_of": 3, "seed": 7, "max_tokens": 16},
    **{"presence_penalty": 0, "frequency_penalty": 0},
    extra_body={"top_k": 40, "min_p": 0.01},
).generate([question, question])


async def streamed() -> str:
    return "".join([part async for part in llm.astream(question)])


reply = {
    "whole": llm.invoke(question),
    "streamed": "".join(llm.stream(question)),
    "streamed_async": asyncio.run(streamed()),
    "batch": llm.batch([question] * 3),
    "chain": chain.invoke({"question": asked}),
    "several": [
        [generation.text for generation in generations] for generations in several.generations
    ],
    "usage": several.llm_output["token_usage"],
}
print(json.dumps(reply))
