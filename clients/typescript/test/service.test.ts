import assert from "node:assert/strict";
import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { after, before, test } from "node:test";

import { pull, Service } from "../src/index.js";

let model: Server;
let baseUrl: string;
let answers = 0;
let service: Server;
let url: string;

before(async () => {
  model = createServer((request, response) => {
    request.resume().on("end", () => {
      answers += 1;
      response.end(JSON.stringify({ choices: [{ message: { role: "assistant", content: "aei" } }] }));
    });
  });
  await new Promise<void>((resolve) => model.listen(0, "127.0.0.1", resolve));
  baseUrl = `http://127.0.0.1:${(model.address() as AddressInfo).port}/v1`;
  const made = new Service({
    capacity: 2,
    tasks: { train: ["a", "b", "c"].map((id) => ({ id, prompt: `sing ${id}` })) },
    rollout: async (asked) => {
      if (asked.task.id === "broken") throw new Error("out of order");
      if (asked.task.id === "no number") return { reward: NaN };
      const misspelt = { reward: 1, credits: [{ value: 1, segment: 0 }] };
      if (asked.task.id === "misspelt") return misspelt;
      if (asked.task.id === "slow") {
        await new Promise((resolve) => asked.signal.addEventListener("abort", resolve));
      }
      const answer = await asked.chat([{ role: "user", content: asked.task.prompt ?? "" }]);
      return { reward: answer.content === "aei" ? 1 : 0 };
    },
  });
  ({ url, server: service } = await made.listen(0));
});

after(() => {
  for (const server of [model, service]) {
    server.closeAllConnections();
    server.close();
  }
});

const asked = (id: string, task: string) => ({
  id,
  task: { id: task, prompt: `sing ${task}` },
  base_url: baseUrl,
  token: "key",
  seed: 1,
  deadline: Date.now() / 1000 + 60,
});

const begin = (body: unknown) =>
  fetch(`${url}/rollouts`, { method: "POST", body: JSON.stringify(body) });

const look = async (id: string) =>
  (await (await fetch(`${url}/rollouts/${id}?wait_s=20`)).json()) as {
    status: string;
    error?: string;
    score?: { reward: number };
  };

test("tasks come in pages", async () => {
  const first = await (await fetch(`${url}/tasks?split=train&limit=2`)).json();
  assert.deepEqual([first.tasks.length, first.next], [2, "2"]);
  const last = await (await fetch(`${url}/tasks?split=train&limit=2&after=2`)).json();
  assert.deepEqual([last.tasks.map((task: { id: string }) => task.id), last.next], [["c"], null]);
});

test("a rollout is run once, and its result can be asked for again", async () => {
  const before = answers;
  assert.equal((await begin(asked("one", "a"))).status, 202);
  assert.equal((await look("one")).score?.reward, 1);
  assert.equal((await begin(asked("one", "a"))).status, 200);
  assert.equal(answers, before + 1);
});

test("what throws has failed, and so has a result that is none", async () => {
  for (const task of ["broken", "no number", "misspelt"]) {
    await begin(asked(task.replace(" ", "-"), task));
    const failed = await look(task.replace(" ", "-"));
    assert.equal(failed.status, "failed");
    assert.equal(failed.score, undefined);
  }
});

test("no more at once than there is room for, and a cancelled one makes room", async () => {
  for (const id of ["s1", "s2"]) assert.equal((await begin(asked(id, "slow"))).status, 202);
  assert.equal((await begin(asked("s3", "a"))).status, 503);
  assert.equal((await fetch(`${url}/rollouts/s1`, { method: "DELETE" })).status, 204);
  while ((await begin(asked("s3", "a"))).status === 503);
  assert.equal((await look("s3")).status, "done");
  assert.equal((await fetch(`${url}/rollouts/s1`)).status, 404);
  await fetch(`${url}/rollouts/s2`, { method: "DELETE" });
});

test("what cannot be read is a 400", async () => {
  assert.equal((await begin({ id: "x" })).status, 400);
  assert.equal((await fetch(`${url}/rollouts`, { method: "POST", body: "{" })).status, 400);
  assert.equal((await fetch(`${url}/rollouts/x?wait_s=much`)).status, 400);
});

test("a result that is refused has failed", async () => {
  const statuses: string[] = [];
  const gateway = createServer(async (request, response) => {
    const body = JSON.parse(Buffer.concat(await request.toArray()).toString());
    if (request.url === "/v1/sessions") {
      const callback_url = `${here}/v1/sessions/x/score`;
      response.end(JSON.stringify({ ...asked("x", "a"), callback_url, callback_token: "score" }));
    } else {
      statuses.push(body.status, body.error ?? "");
      response.writeHead(body.status === "done" ? 400 : 204).end("no answer");
    }
  });
  await new Promise<void>((resolve) => gateway.listen(0, "127.0.0.1", resolve));
  const here = `http://127.0.0.1:${(gateway.address() as AddressInfo).port}`;
  try {
    assert.equal(await pull(here, "scheduler", () => ({ reward: 0.5 })), true);
    assert.deepEqual(statuses.slice(0, 3), ["done", "", "failed"]);
    assert.match(statuses[3] ?? "", /returned 400: no answer/);
    assert.equal(statuses.length, 4);
  } finally {
    gateway.closeAllConnections();
    gateway.close();
  }
});

test("a session that is asked for is run, and its result sent to a gateway that was away", async () => {
  const scores: unknown[] = [];
  let dropped = 0;
  const gateway = createServer(async (request, response) => {
    const body = JSON.parse(Buffer.concat(await request.toArray()).toString());
    if (request.url === "/v1/sessions" && scores.length === 0) {
      const callback_url = `${here}/v1/sessions/x/score`;
      response.end(JSON.stringify({ ...asked("x", "a"), callback_url, callback_token: "score" }));
    } else if (request.url !== "/v1/sessions" && dropped < 4) {
      dropped++; // as if the gateway were away
      request.socket.destroy();
    } else {
      if (request.url !== "/v1/sessions") scores.push([request.headers.authorization, body.score]);
      response.writeHead(204).end();
    }
  });
  await new Promise<void>((resolve) => gateway.listen(0, "127.0.0.1", resolve));
  const here = `http://127.0.0.1:${(gateway.address() as AddressInfo).port}`;
  try {
    assert.equal(await pull(here, "scheduler", () => ({ reward: 0.5 })), true);
    assert.deepEqual(scores, [
      ["Bearer score", { reward: 0.5, parts: [], flags: [], credit: [] }],
    ]);
    assert.equal(await pull(here, "scheduler", () => ({ reward: 0.5 })), false);
  } finally {
    gateway.closeAllConnections();
    gateway.close();
  }
});
