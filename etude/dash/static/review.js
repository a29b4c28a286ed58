// Flagged sessions, the verdicts of people on them, and the detectors' precision and recall by these.

import { html, useState } from "/vendor/preact.js";
import { post, runPath, useData } from "/api.js";
import { Text } from "/code.js";
import { Card, Chip, Link, Loading, Problem, Reward, moment, percent, place } from "/ui.js";

export const WHO = "etude-who";

function Evidence({ run, id }) {
  const { data } = useData(runPath(run, `sessions/${encodeURIComponent(id)}`), 0);
  if (!data) return html`<p class="loading">reading …</p>`;
  const parts = data.session ? data.session.parts : [];
  return html`<div class="evidence">
    ${parts.map((part) => html`<div class="part" key=${part.name}><div><b>${part.name}</b><${Reward} value=${part.value} /></div>${part.evidence && html`<${Text} text=${part.evidence} />`}</div>`)}
    ${!parts.length && html`<p class="dim">${data.not_stored ?? "the score has no parts"}</p>`}
  </div>`;
}

function Judge({ run, id, who, done }) {
  const [note, setNote] = useState("");
  const [reward, setReward] = useState("");
  const [error, setError] = useState(null);
  const send = (verdict) => async () => {
    try {
      await post(runPath(run, "review"), { session: id, verdict, who, note, reward: reward === "" ? null : Number(reward) });
      setError(null);
      setNote("");
      done();
    } catch (problem) {
      setError(problem);
    }
  };
  return html`<div class="judge">
    <input aria-label=${`note on ${id}`} placeholder="note" value=${note} onInput=${(event) => setNote(event.target.value)} />
    <input aria-label=${`correct reward of ${id}`} type="number" step="any" placeholder="reward" value=${reward} onInput=${(event) => setReward(event.target.value)} />
    <button type="button" class="bad" disabled=${!who} onClick=${send("cheat")}>confirm</button>
    <button type="button" class="good" disabled=${!who} onClick=${send("honest")}>dismiss</button>
    ${error && html`<${Problem} error=${error} />`}
  </div>`;
}

export function Name({ who, setWho }) {
  const name = (event) => {
    localStorage.setItem(WHO, event.target.value);
    setWho(event.target.value);
  };
  return html`<label>your name <input value=${who} onInput=${name} /></label>`;
}

// For any session: cheats that no detector has flagged count in its recall.
export function Verdict({ run, id }) {
  const [who, setWho] = useState(localStorage.getItem(WHO) ?? "");
  const [stored, setStored] = useState(false);
  return html`<${Card} title="Verdict" note="is it a cheat?">
    <${Name} who=${who} setWho=${setWho} />
    <${Judge} run=${run} id=${id} who=${who} done=${() => setStored(true)} />
    ${stored && html`<p class="good">stored; <${Link} to=${place(run, "review")}>all verdicts<//></p>`}
  </${Card}>`;
}

function Item({ run, row, who, writes, done }) {
  const [open, setOpen] = useState(false);
  return html`<section class="card item">
    <div class="titlebar">
      <${Link} to=${place(run, `sessions/${row.id}`)}><b>${row.id}</b><//>
      ${row.flags.map((flag) => html`<${Chip} key=${flag} tone="bad">${flag}<//>`)}
      <${Reward} value=${row.reward} /><span class="dim">${row.task}, ${row.became}</span>
      <button type="button" aria-expanded=${open} onClick=${() => setOpen(!open)}>evidence</button>
    </div>
    ${open && html`<${Evidence} run=${run} id=${row.id} />`}
    ${row.verdicts.map((each) => html`<p key=${each.t}><${Chip} tone=${each.verdict === "cheat" ? "bad" : "good"}>${each.verdict}<//> ${each.who}, <span class="dim">${moment(each.t)}</span>${each.reward != null ? ` reward ${each.reward}` : ""} ${each.note}</p>`)}
    ${writes && html`<${Judge} run=${run} id=${row.id} who=${who} done=${done} />`}
  </section>`;
}

export function Review({ run, writes }) {
  const [who, setWho] = useState(localStorage.getItem(WHO) ?? "");
  const [turn, setTurn] = useState(0);
  const { data, error } = useData(`${runPath(run, "review")}?turn=${turn}`, 3000);
  if (!data) return html`<${Loading} error=${error} />`;
  return html`
    <div class="titlebar"><h1>Suspected cheats</h1><span class="dim">${data.flagged} flagged, ${data.judged} with a verdict</span>
      ${writes ? html`<${Name} who=${who} setWho=${setWho} />` : html`<span class="dim">verdicts need a token: start <code>etude dash</code> with <code>--token-file</code></span>`}</div>
    ${data.detectors.length > 0 &&
    html`<${Card} title="Detectors" note="according to the verdicts so far">
      <table><thead><tr><th>flag</th><th class="num">flagged</th><th class="num">judged</th><th class="num">precision</th><th class="num">recall</th></tr></thead>
      <tbody>${data.detectors.map((each) => html`<tr key=${each.flag}><td><${Link} to=${place(run, "rollouts", { flag: each.flag })}>${each.flag}<//></td><td class="num">${each.flagged}</td><td class="num">${each.judged}</td><td class="num">${percent(each.precision)}</td><td class="num">${percent(each.recall)}</td></tr>`)}</tbody></table>
    </${Card}>`}
    ${data.queue.map((row) => html`<${Item} key=${row.id} run=${run} row=${row} who=${who} writes=${writes} done=${() => setTurn(turn + 1)} />`)}
    ${!data.queue.length && html`<${Card}><p class="empty good">no session is flagged: environments flag sessions with Score(flags=("…",))</p></${Card}>`}
  `;
}
