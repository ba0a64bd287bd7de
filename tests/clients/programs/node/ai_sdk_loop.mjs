// The AI SDK: a tool that takes a set, an answer to its result, an open object, of chats and of
// responses; prints JSON. Argument: the URL.
import { createOpenAI } from '@ai-sdk/openai';
import { generateObject, generateText, jsonSchema, stepCountIs, tool } from 'ai';

const names = { type: 'array', uniqueItems: true, minItems: 1, maxItems: 3, items: { type: 'string', maxLength: 9 } };
const person = { name: { type: 'string' }, age: { type: 'integer' }, hats: { type: 'array', items: { type: 'string' } } };
const object = (properties) => jsonSchema({ type: 'object', properties, required: Object.keys(properties) });
const openai = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: 'none' });
const count = tool({ description: 'Counts.', inputSchema: object({ names }), execute: async ({ names }) => new Set(names).size });
const prompt = 'How many are 2 hats and 3 hats?';

const results = {};
for (const [api, model] of Object.entries({ chats: openai.chat('demo'), responses: openai('demo') })) {
  const asked = { model, prompt, maxRetries: 0 };
  const looped = await generateText({
    ...asked, tools: { count }, temperature: 0, maxOutputTokens: 200, stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'auto' }),
  });
  const people = [];
  for (const maxOutputTokens of [60, 100, 200, 400, undefined]) {
    people.push((await generateObject({ ...asked, maxOutputTokens, schema: object(person) })).object);
  }
  results[api] = { counted: looped.steps[0].toolResults[0].output, answer: looped.text, people };
}
console.log(JSON.stringify(results));
