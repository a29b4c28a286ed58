// All attempts at one task: two of them side by side, initially the best and the worst.

import { html } from "/vendor/preact.js";
import { runPath, useData } from "/api.js";
import { Diff, changes } from "/code.js";
import { Conversation, Score } from "/session.js";
import { Card, Chip, Link, Loading, Reward, go, place } from "/ui.js";

function Side({ run, attempt }) {
  const changed = changes(attempt.turns);
  return html`<div class="side">
    <h2><${Link} to=${place(run, `sessions/${attempt.id}`)}>${attempt.id}<//> <${Chip}>${attempt.status}<//></h2>
    <${Score} session=${attempt} />
    ${changed && html`<${Card} title="Changes"><${Diff} text=${changed} /></${Card}>`}
    <${Conversation} turns=${attempt.turns} />
  </div>`;
}

export function Group({ run, id, query }) {
  const { data, error } = useData(runPath(run, `groups/${encodeURIComponent(id)}`), 0);
  if (!data) return html`<${Loading} error=${error} />`;
  const ranked = [...data.attempts].sort((a, b) => (b.reward ?? -1) - (a.reward ?? -1));
  const find = (name, other) => data.attempts.find((each) => each.id === name) ?? other;
  const left = find(query.left, ranked[0]);
  const right = find(query.right, ranked[ranked.length - 1]);
  const pick = (change) => go(place(run, `groups/${id}`, { left: left.id, right: right.id, ...change }), { replace: true });
  return html`
    <div class="titlebar"><h1>${id}</h1><${Link} to=${place(run, "rollouts", { task: left.task })}>${left.task}<//></div>
    <div class="attempts" role="group" aria-label="attempts">
      ${ranked.map(
        (each) => html`<div key=${each.id} class=${each === left || each === right ? "chosen" : ""}>
          <${Link} to=${place(run, `sessions/${each.id}`)}>${each.id.slice(each.id.lastIndexOf("."))}<//> <${Reward} value=${each.reward} />
          <button type="button" aria-pressed=${each === left} aria-label=${`${each.id} on the left`} onClick=${() => pick({ left: each.id })}>left</button>
          <button type="button" aria-pressed=${each === right} aria-label=${`${each.id} on the right`} onClick=${() => pick({ right: each.id })}>right</button>
        </div>`,
      )}
    </div>
    <div class="halves"><${Side} key=${left.id} run=${run} attempt=${left} /><${Side} key=${right.id} run=${run} attempt=${right} /></div>
  `;
}
