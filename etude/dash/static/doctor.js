// Unfinished rollouts: what each waits for, and for how long.

import { html } from "/vendor/preact.js";
import { runPath, useData } from "/api.js";
import { Alarms, Bar, Card, Link, Loading, clock, moment, place } from "/ui.js";

export function Doctor({ run }) {
  const { data, error } = useData(runPath(run, "doctor"));
  if (!data) return html`<${Loading} error=${error} />`;
  const most = Math.max(1, ...data.reasons.map((each) => each.count));
  return html`
    <${Alarms} alarms=${data.alarms} advice=${data.advice} missing=${data.missing} />
    <${Card} title="Waiting" note=${`newest event: ${moment(data.told)}; in a terminal: etude doctor RUN`}>
      ${data.count
        ? html`<table>
            <thead><tr><th class="num">rollouts</th><th><span class="hidden">share</span></th><th>wait for</th><th class="num">longest</th></tr></thead>
            <tbody>${data.reasons.map((each) => html`<tr key=${each.waits_for}><td class="num"><b>${each.count}</b></td><td class="fit"><${Bar} share=${each.count / most} /></td><td>${each.waits_for}</td><td class="num">${clock(each.longest_s)}</td></tr>`)}</tbody>
          </table>`
        : html`<p class="empty good">${data.finished ? "the run is finished: " : ""}no rollout is waiting</p>`}
    </${Card}>
    ${data.count > 0 &&
    html`<${Card} title="One by one" note="longest wait first">
      <table>
        <thead><tr><th>rollout</th><th>task</th><th class="num">for</th><th>waits for</th></tr></thead>
        <tbody>${data.waiting.map(
          (each) => html`<tr key=${each.id}>
            <td><${Link} to=${place(run, `sessions/${each.id}`)}>${each.id}<//></td>
            <td><${Link} class="plain" to=${place(run, "rollouts", { task: each.task })}>${each.task}<//></td>
            <td class="num">${clock(each.seconds)}</td><td>${each.waits_for}</td>
          </tr>`,
        )}</tbody>
      </table>
    </${Card}>`}
  `;
}
