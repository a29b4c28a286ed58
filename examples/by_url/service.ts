/**
 * A toy product as an environment by URL: a jukebox that asks a model for songs, and likes vowels.
 *
 *     npm install && npm run build
 *     node dist/service.js [PORT]
 */

import { Service, type Result, type Rollout, type Task } from "@etude/environment";

const COUNTS: Record<string, number> = { train: 32, heldout: 16 };

function tasks(split: string): Task[] {
  const count = COUNTS[split] ?? 0;
  return Array.from({ length: count }, (_, n) => ({ id: `${split}-${n}`, prompt: `sing ${n}` }));
}

async function rollout(asked: Rollout): Promise<Result> {
  const answer = await asked.chat([{ role: "user", content: asked.task.prompt ?? "" }]);
  const song = answer.content ?? "";
  const vowels = [...song.toLowerCase()].filter((letter) => "aeiou".includes(letter)).length;
  return {
    reward: Math.min(1, (2 * vowels) / Math.max(1, [...song].length)),
    parts: [{ name: "vowels", value: vowels }],
    artifacts: [{ name: "song", text: song }],
  };
}

const service = new Service({ rollout, tasks, capacity: 16 });
const { url } = await service.listen(Number(process.argv[2] ?? 8700));
console.log(`environment at ${url}`);
