"""LiteLLM's proxy, asked for responses, messages and chats, a refusal between; prints JSON.

Arguments: its URL, and its key.
"""

import json
import sys

import anthropic
import openai

QUESTION = "Ava has 6 boxes with 7 pears each. How many pears is that in all?"
url, key = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
claude = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
refused = 0
for _try in range(3):  # the proxy lets a deployment fail once
    try:
        client.responses.create(model="demo", input=QUESTION, previous_response_id="resp_1")
    except openai.BadRequestError as error:
        refused += "previous_response_id" in str(error)
message = claude.messages.create(
    model="demo",
    messages=[{"role": "user", "content": QUESTION}],
    max_tokens=48,
    extra_body={"temperature": 0},  # which this SDK has no name for any more
)
answers = {
    "`/v1/responses`": client.responses.create(
        model="demo", input=QUESTION, max_output_tokens=48, temperature=0
    ).output_text,
    "`/v1/messages`": "".join(block.text for block in message.content if block.type == "text"),
    "`/v1/chat/completions`": client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=48,
        temperature=0,
    )
    .choices[0]
    .message.content,
}
print(json.dumps({"refused": refused, "answers": answers}))
