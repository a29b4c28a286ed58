// Real-time RL: the versions that answer users, the decisions with their reasons, and the updates.

import { html } from "/vendor/preact.js";
import { runPath, useData } from "/api.js";
import { Chart } from "/chart.js";
import { Bar, Card, Chip, Loading, isNumber, moment, percent, short } from "/ui.js";

const STATES = ["collect", "train", "evaluate", "canary", "watch"];
const TONES = { settle: "good", promote: "good", canary: "accent", refuse: "warn", roll_back: "bad", hold: "warn" };
const WHOLE = { whiteSpace: "nowrap" };
const SUITE = /^(.*) loss$/;
const METRIC = /^(.*) gain$/;

const signed = (value) => (isNumber(value) ? `${value >= 0 ? "+" : "−"}${Math.abs(100 * value).toFixed(1)}` : "–");
const names = (evidence, pattern) => Object.keys(evidence).map((key) => pattern.exec(key)).filter(Boolean).map((found) => found[1]);

function State({ state }) {
  const others = state.beside == null ? "all users" : `${percent(1 - state.share)} of users`;
  return html`<${Card} title="Loop" note=${`since ${moment(state.since)}`}>
    <ol class="stages" aria-label="states of the loop">
      ${STATES.map((name) => html`<li key=${name} class=${state.doing === name ? "under-way" : ""} aria-current=${state.doing === name ? "step" : undefined}>${name}</li>`)}
      ${state.doing === "held" && html`<li class="under-way" aria-current="step">held</li>`}
    </ol>
    <div class="tiles">
      <div class="tile"><span>live</span><b>version ${state.live}</b><small>${others}</small></div>
      <div class="tile"><span>compared with it</span><b>${state.beside == null ? "none" : `version ${state.beside}`}</b><small>${state.beside == null ? "no comparison" : `${percent(state.share)} of users`}</small></div>
      <div class="tile"><span>held out</span><b>${percent(state.heldout_share)}</b><small>of users stay with ${state.pools.heldout == null ? "no version" : `version ${state.pools.heldout}`}</small></div>
      <div class="tile"><span>updates</span><b>${state.deployed} live</b><small>${state.refused} refused, ${state.rolled_back} rolled back</small></div>
    </div>
  </${Card}>`;
}

function Gains({ changes }) {
  const looked = changes.filter((each) => names(each.evidence, METRIC).length && ["settle", "roll_back"].includes(each.action)).reverse();
  const metrics = [...new Set(looked.flatMap((each) => names(each.evidence, METRIC)))];
  const series = metrics.map((name, n) => ({ label: name, x: looked.map((each) => each.version), y: looked.map((each) => each.evidence[`${name} gain`]), colour: n }));
  return html`<${Chart} title="Gain over the previous version" note="by version, from users' reactions; higher is better" series=${series} unit=${(value) => percent(value, 1)} />`;
}

function Gate({ changes }) {
  const judged = changes.filter((each) => names(each.evidence, SUITE).length);
  return html`<${Card} title="Gate" note="solved by the previous version and by the candidate; largest plausible loss against the margin, in points">
    <div class="scroll" tabindex="0" role="region" aria-label="gate"><table>
      <thead><tr><th class="num">version</th><th>suite</th><th class="num">before</th><th class="num">candidate</th><th class="num">largest loss</th><th class="num">margin</th><th></th></tr></thead>
      <tbody>
        ${judged.flatMap((each) => names(each.evidence, SUITE).map((name) => {
          const [loss, margin] = [each.evidence[`${name} loss`], each.evidence[`${name} margin`]];
          return html`<tr key=${`${each.number} ${name}`}>
            <td class="num">${each.version}</td><td>${name}</td>
            <td class="num">${percent(each.evidence[`${name} live`], 1)}</td><td class="num">${percent(each.evidence[`${name} candidate`], 1)}</td>
            <td class="num">${(100 * loss).toFixed(1)}</td><td class="num">${(100 * margin).toFixed(1)}</td>
            <td><${Chip} tone=${loss <= margin ? "good" : "bad"}>${loss <= margin ? "passed" : "refused"}<//></td>
          </tr>`;
        }))}
        ${!judged.length && html`<tr><td class="dim" colspan="7">no decisions yet</td></tr>`}
      </tbody>
    </table></div>
  </${Card}>`;
}

function Canary({ changes }) {
  const looked = changes.filter((each) => names(each.evidence, METRIC).length);
  return html`<${Card} title="Canary and watch" note="users' reactions at each decision; the interval of the gain, in points, is valid at every look">
    <div class="scroll" tabindex="0" role="region" aria-label="canary"><table>
      <thead><tr><th class="num">version</th><th>then</th><th>metric</th><th class="num">before</th><th class="num">new</th><th class="num">gain</th><th class="num">interval</th></tr></thead>
      <tbody>
        ${looked.flatMap((each) => names(each.evidence, METRIC).map((name) => html`<tr key=${`${each.number} ${name}`}>
          <td class="num">${each.version}</td><td><${Chip} tone=${TONES[each.action]}>${each.action === "canary" ? `to ${percent(each.share)}` : each.action}<//></td><td>${name}</td>
          <td class="num">${percent(each.evidence[`${name} live`], 1)}</td><td class="num">${percent(each.evidence[`${name} candidate`], 1)}</td>
          <td class="num">${signed(each.evidence[`${name} gain`])}</td>
          <td class="num dim">${signed(each.evidence[`${name} low`])} to ${signed(each.evidence[`${name} high`])}</td>
        </tr>`))}
        ${!looked.length && html`<tr><td class="dim" colspan="7">no comparisons yet</td></tr>`}
      </tbody>
    </table></div>
  </${Card}>`;
}

function Decisions({ changes }) {
  return html`<${Card} title="Decisions" note="newest first">
    <div class="scroll" tabindex="0" role="region" aria-label="decisions"><table>
      <thead><tr><th>when</th><th>what</th><th class="num">version</th><th class="num">live</th><th class="num">beside it</th><th>why</th></tr></thead>
      <tbody>${changes.map((each) => html`<tr key=${each.number}>
        <td class="dim" style=${WHOLE}>${moment(each.time)}</td><td style=${WHOLE}><${Chip} tone=${TONES[each.action]}>${each.action}<//> ${each.held && html`<${Chip} tone="warn">held<//>`}</td>
        <td class="num">${each.version}</td><td class="num">${each.live}</td><td class="num">${each.share ? percent(each.share) : "–"}</td><td>${each.why}</td>
      </tr>`)}</tbody>
    </table></div>
  </${Card}>`;
}

function Updates({ updates }) {
  return html`<${Card} title="Credit" note="the sessions of each update; worth: mean of users' feedback, from −1 to 1">
    <div class="scroll" tabindex="0" role="region" aria-label="updates"><table>
      <thead><tr><th class="num">version</th><th class="num">from</th><th class="num">sessions</th><th class="num">users</th><th class="num">answers</th><th class="num">worth</th><th>left out</th><th>became</th></tr></thead>
      <tbody>
        ${updates.map((each) => html`<tr key=${each.version}>
          <td class="num">${each.version}</td><td class="num">${each.base}</td><td class="num">${each.sessions.toLocaleString()}</td><td class="num">${each.users.toLocaleString()}</td>
          <td class="num">${each.answers.toLocaleString()}</td><td class="num">${short(each.worth)}</td>
          <td class="dim">${Object.entries(each.dropped).map(([why, count]) => `${count} ${why}`).join(", ") || "none"}</td>
          <td>${each.became && html`<${Chip} tone=${TONES[each.became]}>${each.became}<//>`}</td>
        </tr>`)}
        ${!updates.length && html`<tr><td class="dim" colspan="8">no batches yet</td></tr>`}
      </tbody>
    </table></div>
  </${Card}>`;
}

function Dropped({ ledger }) {
  const reasons = Object.entries(ledger.dropped);
  const dropped = reasons.reduce((sum, [, count]) => sum + count, 0);
  return html`<${Card} title="Every session, once" note="dropped, by reason">
    <p class="equation"><b>${ledger.issued.toLocaleString()}</b> settled or waiting = <b class="good">${ledger.trained.toLocaleString()}</b> trained + <b class="warn">${dropped.toLocaleString()}</b> dropped + <b class="accent">${ledger.pending.toLocaleString()}</b> pending</p>
    <table><tbody>
      ${reasons.map(([reason, count]) => html`<tr key=${reason}><td>${reason}</td><td class="num"><b>${count.toLocaleString()}</b></td><td class="fit"><${Bar} share=${count / reasons[0][1]} tone="warn" /></td></tr>`)}
      ${!reasons.length && html`<tr><td class="dim">none</td></tr>`}
    </tbody></table>
  </${Card}>`;
}

function Contexts({ contexts, deleted }) {
  return html`<${Card} title="Kinds of requests" note="tools | system prompt, which a baseline can tell apart">
    <table><tbody>${contexts.map((each) => html`<tr key=${each.context}><td><code>${each.context === "|" ? "neither" : each.context}</code></td><td class="num">${each.answers.toLocaleString()}</td><td class="num">${short(each.worth)}</td></tr>`)}</tbody></table>
    <h2>Deleted users<span class="note">and the versions that learnt from their data</span></h2>
    <table><tbody>
      ${deleted.map((each) => html`<tr key=${each.user}><td><code>${each.user}</code></td><td class="dim">${moment(each.time)}</td><td>${each.versions.join(", ") || "none"}</td></tr>`)}
      ${!deleted.length && html`<tr><td class="dim">none</td></tr>`}
    </tbody></table>
  </${Card}>`;
}

export function Realtime({ run }) {
  const { data, error } = useData(runPath(run, "realtime"));
  if (!data) return html`<${Loading} error=${error} />`;
  if (!data.state) return html`<${Card} title="Loop"><p class="dim">No version of this run has been given to users yet: start <code>etude realtime</code>.</p><//>`;
  const worth = [...data.updates].reverse();
  return html`
    <${State} state=${data.state} />
    <div class="halves">
      <${Gains} changes=${data.changes} />
      <${Chart} title="Worth of answers" note="by the version trained on them" series=${[{ label: "mean", x: worth.map((each) => each.version), y: worth.map((each) => each.worth), colour: 0 }]} />
    </div>
    <div class="halves"><${Gate} changes=${data.changes} /><${Canary} changes=${data.changes} /></div>
    <${Updates} updates=${data.updates} />
    <div class="halves"><${Dropped} ledger=${data.ledger} /><${Contexts} contexts=${data.contexts} deleted=${data.deleted} /></div>
    <${Decisions} changes=${data.changes} />
  `;
}
