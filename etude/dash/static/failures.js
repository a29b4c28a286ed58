// Causes of unsolved rollouts, the most frequent first.

import { html } from "/vendor/preact.js";
import { runPath, useData } from "/api.js";
import { Bar, Card, Link, Loading, percent, place } from "/ui.js";

const numberOf = (id) => (id.length > 26 ? `${id.slice(0, 25)}…` : id);

export function Failures({ run, query }) {
  const { data, error } = useData(runPath(run, `failures?${new URLSearchParams(query)}`), 3000);
  if (!data) return html`<${Loading} error=${error} />`;
  const most = Math.max(1, ...data.clusters.map((each) => each.count));
  const active = Object.entries(query);
  return html`
    <div class="titlebar"><h1>Failures by cause</h1>
      <span class="dim">${data.unsolved.toLocaleString()} rollouts did not earn 1${active.length ? `, of those with ${active.map(([key, value]) => `${key} ${value}`).join(", ")}` : ""}</span>
      <${Link} to=${place(run, "rollouts", query)}>show as a table<//></div>
    <${Card} title="Broken" note="infrastructure, agent or environment: no reward, not trained on">
      ${data.broken.length
        ? html`<table><tbody>${data.broken.map((each) => html`<tr key=${each.cause}><td class="num"><b>${each.count}</b></td><td class="fit"><${Bar} share=${each.count / data.broken[0].count} tone="bad" /></td><td><${Link} to=${place(run, "rollouts", { ...query, cause: each.cause })}>${each.cause}<//></td></tr>`)}</tbody></table>`
        : html`<p class="empty">nothing broke</p>`}
    </${Card}>
    <${Card} title="Not solved" note=${`by the evidence and the last failing tool, in the newest ${data.looked_into.toLocaleString()} of ${data.unsolved.toLocaleString()}`}>
      <table>
        <thead><tr><th class="num">rollouts</th><th><span class="hidden">share</span></th><th>evidence</th><th>last error of a tool</th><th>examples</th></tr></thead>
        <tbody>${data.clusters.map(
          (each) => html`<tr key=${`${each.evidence}\n${each.tool}`}>
            <td class="num"><b>${each.count}</b></td>
            <td class="fit"><${Bar} share=${each.count / most} tone="warn" /></td>
            <td>${each.evidence}</td>
            <td class="dim">${each.tool || "none"}</td>
            <td class="examples">${each.examples.slice(0, 3).map((id) => html`<${Link} key=${id} to=${place(run, `sessions/${id}`)}>${numberOf(id)}<//>`)}</td>
          </tr>`,
        )}</tbody>
      </table>
    </${Card}>
    <${Card} title="Tasks" note="lowest solve rate first">
      <table>
        <thead><tr><th>task</th><th class="num">not solved</th><th class="num">attempts</th><th class="num">share</th><th><span class="hidden">share</span></th></tr></thead>
        <tbody>${data.tasks.map(
          (each) => html`<tr key=${each.task}>
            <td><${Link} to=${place(run, "rollouts", { task: each.task })}>${each.task}<//></td>
            <td class="num">${each.unsolved}</td><td class="num">${each.attempts}</td>
            <td class="num">${percent(each.unsolved / each.attempts)}</td>
            <td class="fit"><${Bar} share=${each.unsolved / each.attempts} tone="bad" /></td>
          </tr>`,
        )}</tbody>
      </table>
    </${Card}>
  `;
}
