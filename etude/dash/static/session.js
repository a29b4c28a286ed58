// One session as a person reads it: messages and calls, changes, and score.

import { html } from "/vendor/preact.js";
import { runPath, useData } from "/api.js";
import { Diff, Text, changes, editDiff } from "/code.js";
import { Verdict } from "/review.js";
import { Tokens } from "/tokens.js";
import { Alarms, Became, Card, Chip, Link, Loading, Reward, clock, go, moment, place, short, useKeys } from "/ui.js";

const NAMES = { assistant: "model" };
const brief = (given) =>
  Object.entries(given)
    .map(([key, value]) => {
      const said = /^[\d.-]+$|^[[{]|^(true|false|null)$/.test(value) ? value : `"${value}"`;
      return `${key ? `${key}: ` : ""}${said.length > 48 ? `${said.slice(0, 48)}…` : said}`;
    })
    .join(", ")
    .replace(/\s+/g, " ");

// "error" in a numbered line of a file is not an error
const ofFile = /^\s*\d+\t.*$/gm;
const wrong = (text) => /^(error|traceback|fatal|failed)\b|\b\w*(Error|Exception):/im.test(text.slice(0, 600).replace(ofFile, ""));

// A collapsible call with the answer of its tool.
function Call({ call, answer, open }) {
  const diff = editDiff(call.arguments);
  const first = answer ? answer.text.split("\n", 1)[0] : "";
  return html`<details class=${`call ${answer && wrong(answer.text) ? "wrong" : ""}`} open=${open}>
    <summary><b>${call.name}</b>(${brief(call.arguments)})${answer && html`<span class="gives"> → ${first.slice(0, 90)}${first.length > 90 || answer.text.includes("\n") ? " …" : ""}</span>`}</summary>
    ${diff
      ? html`<${Diff} text=${diff} />`
      : Object.entries(call.arguments).map(([key, value]) => (value.length > 46 || value.includes("\n")) && html`<div key=${key}><small>${key}</small><${Text} text=${value} /></div>`)}
    ${answer ? html`<${Text} text=${answer.text || "(nothing)"} />` : html`<p class="dim">no answer recorded</p>`}
  </details>`;
}

// The answers to a turn's calls: by their ids, otherwise in order.
function paired(turns) {
  const answers = turns.map(() => []);
  const taken = new Set();
  turns.forEach((turn, n) => {
    turn.calls.forEach((call, m) => {
      const later = turns.slice(n + 1);
      let at = later.findIndex((each, k) => each.role === "tool" && call.id && each.call_id === call.id && !taken.has(n + 1 + k));
      if (at < 0 && !call.id) at = later.findIndex((each, k) => each.role === "tool" && !taken.has(n + 1 + k));
      if (at >= 0) {
        taken.add(n + 1 + at);
        answers[n][m] = turns[n + 1 + at];
      }
    });
  });
  return { answers, taken };
}

export function Conversation({ turns }) {
  const { answers, taken } = paired(turns);
  if (!turns.length) return html`<p class="empty">the agent recorded no conversation; see the tokens for what the model read and wrote</p>`;
  return html`<div class="turns">
    ${turns.map(
      (turn, n) =>
        !taken.has(n) &&
        html`<article class=${`turn ${turn.role}`} key=${n}>
          <h3>${NAMES[turn.role] ?? turn.role}</h3>
          <div>
            ${turn.reasoning && html`<details class="reasoning"><summary>reasoning</summary><${Text} text=${turn.reasoning} /></details>`}
            ${turn.text && html`<${Text} text=${turn.text} lines=${turn.role === "system" ? 4 : 30} />`}
            ${turn.calls.map((call, m) => html`<${Call} key=${m} call=${call} answer=${answers[n][m]} />`)}
            ${!turn.text && !turn.calls.length && html`<p class="dim">(says nothing)</p>`}
          </div>
        </article>`,
    )}
  </div>`;
}

export function Score({ session }) {
  return html`<${Card} title="Score">
    <p class="big"><${Reward} value=${session.reward} /></p>
    ${session.flags.map((flag) => html`<${Chip} key=${flag} tone="bad">${flag}<//>`)}
    ${session.parts.map(
      (part) => html`<div class="part" key=${part.name}>
        <div><b>${part.name}</b><${Reward} value=${part.value} /></div>
        ${part.evidence && html`<${Text} text=${part.evidence} lines=${12} />`}
      </div>`,
    )}
    ${session.credit.map((each, n) => html`<p key=${n} class="dim">credit ${short(each.value, 2)} for segment ${each.segment}${each.turn == null ? "" : `, turn ${each.turn}`}</p>`)}
    ${session.error && html`<div class="part"><b class="error">failed</b><${Text} text=${session.error} />${session.traceback && html`<${Text} text=${session.traceback} />`}</div>`}
    ${session.feedback.map((each, n) => html`<p key=${n}><b>${each.kind}</b> ${short(each.value, 2)} <span class="dim">${moment(each.time)}</span> ${each.text}</p>`)}
  </${Card}>`;
}

function Facts({ run, row, session }) {
  const facts = [
    ["task", html`<${Link} to=${place(run, "rollouts", { task: row.task })}>${row.task}<//>`],
    ["group", row.kind === "train" ? html`<${Link} to=${place(run, `groups/${row.group}`)}>${row.group}, side by side<//>` : row.group],
    ["became", html`<${Became} run=${run} row=${row} />`],
    ["versions", row.versions.join(", ") || "–"],
    ["tokens", `${row.length.toLocaleString()}, of which ${row.sampled_tokens.toLocaleString()} sampled`],
    ["turns", row.turns],
    ["time", row.seconds < 60 ? `${row.seconds.toFixed(1)} s` : clock(row.seconds)],
    ["environment", row.source || "–"],
    ["policy", session ? session.policy : "–"],
  ];
  return html`<${Card} title="Session"><dl class="facts">${facts.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl></${Card}>`;
}

export function Session({ run, id, query, writes }) {
  const { data, error } = useData(runPath(run, `sessions/${encodeURIComponent(id)}`), 5000);
  const tab = query.tab ?? "conversation";
  const show = (name) => () => go(place(run, `sessions/${id}`, { tab: name === "conversation" ? "" : name }), { replace: true });
  const [group, number] = [id.slice(0, id.lastIndexOf(".")), Number(id.slice(id.lastIndexOf(".") + 1))];
  const beside = (by) => () => Number.isInteger(number) && number + by >= 0 && go(place(run, `sessions/${group}.${number + by}`, query));
  useKeys({ c: show("conversation"), t: show("tokens"), "[": beside(-1), "]": beside(1) });
  if (!data) return html`<${Loading} error=${error} />`;
  const { row, session } = data;
  const changed = session && (session.diff || changes(session.turns));
  return html`
    <div class="titlebar">
      <h1>${id}</h1><${Chip}>${row.status}<//><${Chip} tone="">${row.kind}<//>
      ${row.kind === "train" && html`<span class="steps"><button type="button" aria-label="previous session" onClick=${beside(-1)}>[</button><button type="button" aria-label="next session" onClick=${beside(1)}>]</button></span>`}
      <span class="tabs" role="tablist">
        ${["conversation", "tokens"].map((name) => html`<button type="button" role="tab" key=${name} aria-selected=${tab === name} onClick=${show(name)}>${name}</button>`)}
      </span>
    </div>
    ${data.not_stored && html`<${Alarms} missing=${[data.not_stored]} />`}
    ${tab === "tokens"
      ? html`<${Tokens} run=${run} id=${id} query=${query} />`
      : html`<div class="reading">
          <div>
            ${session && html`<${Conversation} turns=${session.turns} />`}
            ${!session && row.error && html`<p class="problem">${row.error}</p>`}
          </div>
          <aside>
            ${session && html`<${Score} session=${session} />`}
            ${changed && html`<${Card} title="Changes" note=${session.diff ? "the working copy at the end of the session" : "reconstructed from its reads and edits"}><${Diff} text=${changed} /></${Card}>`}
            <${Facts} run=${run} row=${row} session=${session} />
            ${writes && html`<${Verdict} run=${run} id=${id} />`}
          </aside>
        </div>`}
  `;
}
