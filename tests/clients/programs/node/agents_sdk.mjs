// The Agents SDK: what openai_agents.py asks for; prints JSON. Argument: the URL.
import { Agent, run, setDefaultOpenAIClient, setTracingDisabled, tool } from '@openai/agents';
import OpenAI from 'openai';
import { z } from 'zod';

setTracingDisabled(true);
setDefaultOpenAIClient(new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: 'none' }));

const two = z.union([z.literal(2), z.literal(3)]);
const question = 'Ava has 6 boxes with 7 pears each. How many pears is that in all?';
const add = tool({
  name: 'add', description: 'Adds.', parameters: z.object({ left: two, right: two }),
  execute: async ({ left, right }) => left + right,
});
const count = tool({ name: 'count', description: '', parameters: z.object({}), execute: async () => '5' });
const agent = (others = {}, toolChoice = undefined) => Agent.create({
  name: 'Adder', model: 'demo', modelSettings: { temperature: 0, maxTokens: 48, toolChoice }, ...others,
});
const helper = new Agent({ name: 'Helper', model: 'demo', modelSettings: { temperature: 0, maxTokens: 48 } });
const ran = async (started) => {
  const result = await run(started, question);
  const kinds = result.newItems.map((item) => item.type);
  return { answer: result.finalOutput, kinds, last: result.lastAgent.name };
};
const streaming = await run(agent(), question, { stream: true });
let streamed = '';
for await (const part of streaming.toTextStream()) streamed += part;
await streaming.completed;

console.log(JSON.stringify({
  plain: await ran(agent()),
  streamed,
  tool: await ran(agent({ tools: [count] }, 'required')),
  stopped: await ran(agent({ tools: [add], toolUseBehavior: 'stop_on_first_tool' }, 'required')),
  handoff: await ran(agent({ handoffs: [helper] }, 'required')),
}));
