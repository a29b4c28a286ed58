/**
 * Your product as an environment of Etude, by URL. It needs only node.
 *
 *     const service = new Service({
 *       tasks: { train: [{ id: "1", prompt: "What is 6 * 7?" }] },
 *       rollout: async (asked) => {
 *         const answer = await asked.chat([{ role: "user", content: asked.task.prompt }]);
 *         return { reward: answer.content?.includes("42") ? 1 : 0 };
 *       },
 *     });
 *     await service.listen(8700);
 *
 * A rollout fails by throwing; a failure is never a reward of 0. The protocol is
 * docs/environments-by-url.md of Etude.
 */

import { createHash, timingSafeEqual } from "node:crypto";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";

export interface Message {
  role: string;
  content?: string | null;
  [field: string]: unknown;
}

/** A task, with either a prompt or messages. */
export interface Task {
  id: string;
  prompt?: string;
  messages?: Message[];
  meta?: Record<string, unknown>;
}

/** One component of a score, with its evidence for people to read. */
export interface Part {
  name: string;
  value: number;
  evidence?: string;
}

/** A process reward for one segment of a session, or for one turn of it. */
export interface Credit {
  value: number;
  segment: number;
  turn?: number | null;
}

/** Something that a rollout made, for people to look at: a text, or a URL. */
export interface Artifact {
  name: string;
  text?: string;
  url?: string;
}

/** The result of a rollout: its reward, and details for people to look at. */
export interface Result {
  reward: number;
  parts?: Part[];
  flags?: string[];
  credit?: Credit[];
  artifacts?: Artifact[];
  messages?: Message[];
  /** `timeout`: your product ran out of time, and is scored in its present state. */
  status?: "done" | "timeout";
}

export type Tasks = Record<string, Task[]> | ((split: string) => Task[] | Promise<Task[]>);

export interface ServiceOptions {
  rollout: (asked: Rollout) => Promise<Result> | Result;
  /** Split ("train", "heldout", "novel") -> its tasks, the same at every call. */
  tasks?: Tasks;
  /** Limit on concurrent rollouts. */
  capacity?: number;
  /** Required in requests; the same as ETUDE_SERVICE_TOKEN on Etude's side. */
  token?: string;
}

/** The body of `POST /rollouts`. */
interface RolloutRequest {
  id: string;
  task: Task;
  base_url: string;
  token: string;
  seed: number;
  deadline: number;
  model?: string;
  temperature?: number;
  max_tokens?: number;
  callback_url?: string | null;
  callback_token?: string | null;
}

/** The fields of a `Result`; any other field is a misspelling. */
const FIELDS = new Set<string>([
  "reward",
  "parts",
  "flags",
  "credit",
  "artifacts",
  "messages",
  "status",
] satisfies (keyof Result)[]);

/** The outcome of a rollout, as it is sent. */
type Outcome = Record<string, unknown> & { id: string; status: string };

type Reply = [status: number, body?: unknown];

const KEPT = 4096;
const MAX_WAIT_S = 30;
const MAX_BODY_BYTES = 64 * 2 ** 20;
/** A gateway that is away for longer is given up. */
const AWAY_MS = 60_000;
/** Tries after a gateway came back: it may learn of the session only then. */
const CALLBACK_TRIES = 3;
const REQUIRED = ["id", "task", "base_url", "token", "seed", "deadline"] as const;

class BadRequest extends Error {}

/** An error response of a server. */
class Refused extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

/** One attempt that Etude requests. */
export class Rollout {
  readonly id: string;
  readonly task: Task;
  /** Base URL for the OpenAI client of your product, with `token` as its key. */
  readonly baseUrl: string;
  readonly token: string;
  readonly seed: number;
  /** Seconds since 1970. */
  readonly deadline: number;
  readonly model: string;
  readonly temperature: number;
  readonly maxTokens: number;
  readonly callbackUrl: string | null;
  /**
   * Only for sending the result. Keep it from your product: an agent that finds it could set its
   * own score.
   */
  readonly callbackToken: string | null;
  /** Aborted when the result is not wanted any more. */
  readonly signal: AbortSignal;

  constructor(asked: RolloutRequest, signal: AbortSignal) {
    this.id = asked.id;
    this.task = asked.task;
    this.baseUrl = asked.base_url;
    this.token = asked.token;
    this.seed = asked.seed;
    this.deadline = asked.deadline;
    this.model = asked.model ?? "etude";
    this.temperature = asked.temperature ?? 1;
    this.maxTokens = asked.max_tokens ?? 64;
    this.callbackUrl = asked.callback_url ?? null;
    this.callbackToken = asked.callback_token ?? null;
    this.signal = signal;
  }

  get remainingS(): number {
    return Math.max(0, this.deadline - Date.now() / 1000);
  }

  /** One answer of the model, for products without a client of their own. */
  async chat(messages: Message[], options: Record<string, unknown> = {}): Promise<Message> {
    const asked = {
      model: this.model,
      messages,
      temperature: this.temperature,
      max_tokens: this.maxTokens,
      seed: this.seed,
      ...options,
    };
    const late = AbortSignal.timeout(Math.ceil(1000 * (this.remainingS + 1)));
    const signal = AbortSignal.any([this.signal, late]);
    const answer = await post(`${this.baseUrl}/chat/completions`, asked, this.token, signal);
    const said = (await answer.json()) as { choices: { message: Message }[] };
    return said.choices[0]!.message;
  }
}

/** Answers Etude's requests, and runs a function for each rollout. */
export class Service {
  readonly #options: ServiceOptions;
  readonly #capacity: number;
  readonly #known = new Map<string, Outcome>();
  readonly #running = new Map<string, AbortController>();
  readonly #waiting = new Map<string, Set<() => void>>();

  constructor(options: ServiceOptions) {
    this.#options = options;
    this.#capacity = options.capacity ?? 8;
  }

  /** Serve on a port; 0 chooses a free one. */
  async listen(port = 8700, host = "127.0.0.1"): Promise<{ url: string; server: Server }> {
    const server = createServer((request, response) => void this.handle(request, response));
    await new Promise<void>((resolve, reject) => {
      server.once("error", reject);
      server.listen(port, host, resolve);
    });
    const { port: bound } = server.address() as AddressInfo;
    return { url: `http://${host}:${bound}`, server };
  }

  /** The request handler, for a server of your own. */
  async handle(request: IncomingMessage, response: ServerResponse): Promise<void> {
    let [status, body]: Reply = [401, { error: "the token is missing or invalid" }];
    if (this.#isAllowed(request.headers.authorization ?? "")) {
      try {
        const url = new URL(request.url ?? "/", "http://service");
        [status, body] = await this.#answer(request, url);
      } catch (e) {
        [status, body] = [e instanceof BadRequest ? 400 : 500, { error: String(e) }];
      }
    }
    response.statusCode = status;
    if (status === 503) response.setHeader("Retry-After", "1");
    if (body === undefined) {
      response.end();
    } else {
      response.setHeader("Content-Type", "application/json");
      response.end(JSON.stringify(body));
    }
  }

  #isAllowed(authorization: string): boolean {
    if (this.#options.token === undefined) return true;
    const digest = (text: string) => createHash("sha256").update(text).digest();
    return timingSafeEqual(digest(authorization), digest(`Bearer ${this.#options.token}`));
  }

  async #answer(request: IncomingMessage, url: URL): Promise<Reply> {
    const { method } = request;
    const [what, id, ...rest] = url.pathname.split("/").filter(Boolean);
    if (rest.length === 0 && id === undefined) {
      if (method === "GET" && what === "health") {
        const [capacity, running] = [this.#capacity, this.#running.size];
        return [200, { status: "ok", capacity, running }];
      }
      if (method === "GET" && what === "tasks") return this.#page(url.searchParams);
      if (method === "POST" && what === "rollouts") return this.#begin(await read(request));
    } else if (rest.length === 0 && what === "rollouts") {
      const name = decodeURIComponent(id!);
      if (method === "GET") return this.#look(name, numberOf(url.searchParams, "wait_s", 0));
      if (method === "DELETE") return this.#cancel(name);
    }
    return [404, { error: `no route ${method} ${url.pathname}` }];
  }

  async #page(query: URLSearchParams): Promise<Reply> {
    const { tasks } = this.#options;
    if (tasks === undefined) {
      return [404, { error: "this service has no tasks: set tasks.path to a file" }];
    }
    const split = query.get("split") ?? "train";
    const all = typeof tasks === "function" ? await tasks(split) : (tasks[split] ?? []);
    const first = numberOf(query, "after", 0);
    const end = first + numberOf(query, "limit", 500);
    return [200, { tasks: all.slice(first, end), next: end < all.length ? String(end) : null }];
  }

  #begin(body: unknown): Reply {
    const asked = body as RolloutRequest;
    const missing = REQUIRED.filter((field) => asked?.[field] === undefined);
    if (missing.length > 0) throw new BadRequest(`invalid rollout: ${missing.join(", ")} missing`);
    const known = this.#known.get(asked.id);
    if (known !== undefined) return [known.status === "running" ? 202 : 200, known];
    if (this.#running.size >= this.#capacity) {
      return [503, { error: "at capacity: try again in a moment" }];
    }
    const cancel = new AbortController();
    const begun: Outcome = { id: asked.id, status: "running" };
    this.#running.set(asked.id, cancel);
    this.#known.set(asked.id, begun);
    void this.#run(new Rollout(asked, cancel.signal));
    return [202, begun];
  }

  async #run(asked: Rollout): Promise<void> {
    const outcome = await outcomeOf(this.#options.rollout, asked);
    this.#running.delete(asked.id);
    if (asked.signal.aborted) return;
    this.#known.set(asked.id, outcome);
    for (const id of this.#known.keys()) {
      if (this.#known.size - this.#running.size <= KEPT) break;
      if (!this.#running.has(id)) this.#known.delete(id);
    }
    this.#wake(asked.id);
    await callBack(asked, outcome);
  }

  async #look(id: string, waitS: number): Promise<Reply> {
    if (this.#known.get(id)?.status === "running" && waitS > 0) {
      await this.#ended(id, 1000 * Math.min(waitS, MAX_WAIT_S));
    }
    const known = this.#known.get(id);
    return known === undefined ? [404, { error: `no rollout ${id}` }] : [200, known];
  }

  #ended(id: string, ms: number): Promise<void> {
    return new Promise((resolve) => {
      const waiting = this.#waiting.get(id) ?? new Set();
      const wake = () => {
        clearTimeout(timer);
        waiting.delete(wake);
        if (waiting.size === 0) this.#waiting.delete(id);
        resolve();
      };
      const timer = setTimeout(wake, ms);
      this.#waiting.set(id, waiting.add(wake));
    });
  }

  #wake(id: string): void {
    for (const wake of [...(this.#waiting.get(id) ?? [])]) wake();
  }

  #cancel(id: string): Reply {
    this.#running.get(id)?.abort();
    this.#known.delete(id);
    this.#wake(id);
    return [204];
  }
}

/**
 * Work the other way round: claim one session at a gateway, run it and send the result. Resolves to
 * false if there was none. Run as many calls at once as you have room for.
 */
export async function pull(
  gateway: string,
  token: string,
  rollout: ServiceOptions["rollout"],
): Promise<boolean> {
  const patient = AbortSignal.timeout(2000 * MAX_WAIT_S);
  const answer = await post(`${gateway}/v1/sessions`, { wait_s: MAX_WAIT_S }, token, patient);
  if (answer.status === 204) return false;
  const asked = new Rollout((await answer.json()) as RolloutRequest, new AbortController().signal);
  await callBack(asked, await outcomeOf(rollout, asked));
  return true;
}

async function outcomeOf(rollout: ServiceOptions["rollout"], asked: Rollout): Promise<Outcome> {
  try {
    return { id: asked.id, ...sent(await rollout(asked)) };
  } catch (e) {
    return { id: asked.id, status: "failed", error: String(e) };
  }
}

function sent(result: Result): Record<string, unknown> & { status: string } {
  const { reward, parts = [], flags = [], credit = [] } = result;
  const { artifacts = [], messages = [], status = "done" } = result;
  const unknown = Object.keys(result).filter((field) => !FIELDS.has(field));
  if (unknown.length > 0) throw new Error(`unknown fields in the result: ${unknown.join(", ")}`);
  if (!Number.isFinite(reward)) throw new Error(`the reward must be a number, not ${reward}`);
  return { status, score: { reward, parts, flags, credit }, artifacts, messages };
}

function numberOf(query: URLSearchParams, name: string, otherwise: number): number {
  const value = Number(query.get(name) ?? otherwise);
  if (!Number.isFinite(value) || value < 0) throw new BadRequest(`${name} is not a number`);
  return value;
}

async function read(request: IncomingMessage): Promise<unknown> {
  const chunks: Buffer[] = [];
  let size = 0;
  for await (const chunk of request) {
    chunks.push(chunk as Buffer);
    size += (chunk as Buffer).length;
    if (size > MAX_BODY_BYTES) throw new BadRequest(`more than ${MAX_BODY_BYTES} bytes`);
  }
  try {
    return JSON.parse(Buffer.concat(chunks).toString());
  } catch (e) {
    throw new BadRequest(`the body is not valid JSON: ${e}`);
  }
}

async function post(
  url: string,
  body: unknown,
  token: string,
  signal: AbortSignal,
): Promise<Response> {
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${token}` };
  const answer = await fetch(url, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) {
    const said = `${url} returned ${answer.status}: ${await answer.text()}`;
    throw new Refused(said, answer.status);
  }
  return answer;
}

/**
 * Send the result to the gateway, waiting for one that is away. If the gateway rejects the result
 * (400), send a failure instead, so that the run need not wait for the deadline. If it rejects the
 * request itself, give up: Etude will ask for the result.
 */
async function callBack(asked: Rollout, outcome: Outcome): Promise<void> {
  const { callbackUrl, callbackToken } = asked;
  if (callbackUrl === null || callbackToken === null) return;
  const givenUp = Date.now() + AWAY_MS;
  let refusals = 0;
  while (Date.now() < givenUp && refusals < CALLBACK_TRIES) {
    try {
      await post(callbackUrl, outcome, callbackToken, AbortSignal.timeout(10_000));
      return;
    } catch (e) {
      if (e instanceof Refused) {
        if (e.status === 400 && outcome.status !== "failed") {
          outcome = { id: asked.id, status: "failed", error: e.message };
          continue;
        }
        if (e.status !== 404 && e.status !== 503) return;
        refusals++;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}
