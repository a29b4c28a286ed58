// Blind comparison of two versions at the same tasks, side by side without their names.

import { html, useRef, useState } from "/vendor/preact.js";
import { post, runPath, useData } from "/api.js";
import { Diff, changes } from "/code.js";
import { Name, WHO } from "/review.js";
import { Conversation } from "/session.js";
import { Card, Loading, Problem, go, place, useKeys, useRested } from "/ui.js";

function Side({ name, turns }) {
  const changed = changes(turns);
  return html`<div class="side">
    <h2>${name}</h2>
    ${changed && html`<${Card} title="Changes"><${Diff} text=${changed} /></${Card}>`}
    <${Conversation} turns=${turns} />
  </div>`;
}

function Versions({ title, versions, value, set }) {
  return html`<label>${title} <select value=${value} onChange=${(event) => set(event.target.value)}>
    <option value="">–</option>
    ${versions.map((each) => html`<option key=${each.version} value=${each.version}>version ${each.version} (${each.sessions} sessions)</option>`)}
  </select></label>`;
}

function Result({ result, before, after }) {
  const rows = [[`version ${before}`, result.before], [`version ${after}`, result.after], ["tie", result.tie]];
  return html`<details class="card"><summary>preferences so far, by everyone</summary>
    <table><tbody>${rows.map(([name, count]) => html`<tr key=${name}><td>${name}</td><td class="num">${count}</td></tr>`)}</tbody></table>
  </details>`;
}

export function Compare({ run, query, writes }) {
  const [who, setWho] = useState(localStorage.getItem(WHO) ?? "");
  const [turn, setTurn] = useState(0);
  const [problem, setProblem] = useState(null);
  const { before = "", after = "" } = query;
  const asked = new URLSearchParams({ before: before || -1, after: after || -1, who: useRested(who), turn });
  const { data, error } = useData(runPath(run, `compare?${asked}`), 0);
  const set = (change) => go(place(run, "compare", { ...query, ...change }), { replace: true });

  // The previous answer stays visible while a name is typed; judging is disabled meanwhile.
  const shown = useRef(null);
  if (data) shown.current = data;
  const found = shown.current;
  const next = found && found.next;
  const judge = (verdict) => async () => {
    if (!data || !next || !who || !writes) return;
    try {
      await post(runPath(run, "compare"), { before: Number(before), after: Number(after), pair: next.pair, verdict, who });
      setProblem(null);
      setTurn(turn + 1);
    } catch (failed) {
      setProblem(failed);
    }
  };
  useKeys({ ArrowLeft: judge("left"), ArrowRight: judge("right"), "=": judge("tie") });

  if (!found) return html`<${Loading} error=${error} />`;
  const chosen = before !== "" && after !== "";
  return html`
    <div class="titlebar"><h1>Which is better?</h1>
      <${Versions} title="between" versions=${found.versions} value=${before} set=${(value) => set({ before: value })} />
      <${Versions} title="and" versions=${found.versions} value=${after} set=${(value) => set({ after: value })} />
      ${writes ? html`<${Name} who=${who} setWho=${setWho} />` : html`<span class="dim">verdicts need a token: start <code>etude dash</code> with <code>--token-file</code></span>`}
    </div>
    ${!chosen && html`<${Card}><p class="empty">choose two versions of the policy: their sessions at the same tasks are shown in pairs, without their names</p></${Card}>`}
    ${chosen && !next && html`<${Card}><p class="empty">${found.pairs ? `${found.pairs - found.left} of ${found.pairs} pairs are judged${found.left ? ", and the others are alike" : ""}; Rollouts exports them as preferences.jsonl` : "no task was tried by both versions"}</p></${Card}>`}
    ${(problem ?? error) && html`<${Problem} error=${problem ?? error} />`}
    ${next &&
    html`<div class="toolbar choice">
        <span class="dim">${next.task}; ${found.left} of ${found.pairs} pairs to go</span>
        <button type="button" disabled=${!writes || !who} onClick=${judge("left")}>← left</button>
        <button type="button" disabled=${!writes || !who} onClick=${judge("tie")}>= tie</button>
        <button type="button" disabled=${!writes || !who} onClick=${judge("right")}>right →</button>
      </div>
      <div class="halves"><${Side} key=${`${next.pair} left`} name="left" turns=${next.left} /><${Side} key=${`${next.pair} right`} name="right" turns=${next.right} /></div>`}
    ${chosen && found.pairs > found.left && html`<${Result} result=${found.result} before=${before} after=${after} />`}
  `;
}
