// The AI SDK with the default of createOpenAI, which asks for responses; prints JSON. Argument: the URL.
import { createOpenAI } from '@ai-sdk/openai';
import { generateObject, generateText, streamText, tool } from 'ai';
import { z } from 'zod';

const two = z.union([z.literal(2), z.literal(3)]);
const schema = z.object({ left: two, right: two });
const openai = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: 'none' });
const chats = openai.chat('demo');
const asked = {
  model: openai('demo'),
  prompt: 'Ava has 6 boxes with 7 pears each. How many pears is that in all?',
  temperature: 0,
  maxOutputTokens: 64,
  maxRetries: 0,
};
const add = tool({ description: 'Adds.', inputSchema: schema, execute: async ({ left, right }) => left + right });
const tools = { tools: { add }, toolChoice: 'required' };

const whole = await generateText(asked);
const streaming = streamText(asked);
let streamed = '';
for await (const part of streaming.textStream) streamed += part;
const called = await generateText({ ...asked, ...tools });
const calling = streamText({ ...asked, ...tools });
await calling.consumeStream();

console.log(JSON.stringify({
  whole: whole.text,
  streamed,
  objects: {
    '`generateObject({model: openai(…)})`': (await generateObject({ ...asked, schema })).object,
    '`generateObject({model: openai.chat(…)})`': (await generateObject({ ...asked, model: chats, schema })).object,
    '`generateText({tools})`': called.toolCalls[0].input,
    '`streamText({tools})`': (await calling.toolCalls)[0].input,
  },
  added: called.toolResults[0].output,
}));
