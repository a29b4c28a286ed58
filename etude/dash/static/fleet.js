// Workers, and the weight versions on their way from the trainer to each of them.

import { html } from "/vendor/preact.js";
import { runPath, useData } from "/api.js";
import { Chart } from "/chart.js";
import { Bar, Card, Link, Loading, bytes, isNumber, percent, place } from "/ui.js";

const after = (t, start) => (isNumber(t) && isNumber(start) ? `${Math.max(0, t - start).toFixed(1)} s` : "–");

function Workers({ data }) {
  return html`<div class="tiles">
    ${Object.entries(data.regions).map(
      ([name, each]) => html`<div class="tile" key=${name}>
        <span>${name}</span><b>version ${each.version}</b>
        <small>${percent(each.busy)} busy, ${each.running} running, ${each.waiting} waiting at the last report</small><${Bar} share=${each.busy} />
      </div>`,
    )}
    ${data.slots[1] > 0 && html`<div class="tile"><span>window</span><b>${data.slots[0]} of ${data.slots[1]}</b><small>slots in use and ${data.sessions} ${data.sessions === 1 ? "session" : "sessions"} under way at the last report</small></div>`}
  </div>`;
}

function Versions({ run, data, regions }) {
  const stored = data.versions.some((each) => each.digest); // a copy of a run may be without weights
  return html`<${Card} title="Weight versions" note=${`times are from the end of the step that made the version; workers are checked once a second${stored ? "" : "; the weights are not in this store"}`}>
    <div class="scroll" tabindex="0" role="region" aria-label="weight versions"><table>
      <thead><tr><th class="num">version</th>${stored && html`<th>stage</th><th>digest</th><th class="num">size</th><th></th><th class="num">of the model</th>`}<th class="num">trainer stalled</th>${regions.map((name) => html`<th class="num" key=${name}>seen in ${name}</th>`)}<th class="num">live everywhere</th></tr></thead>
      <tbody>${data.versions.map(
        (each) => html`<tr key=${each.version}>
          <td class="num"><${Link} to=${place(run, "rollouts", { version: each.version })}>${each.version}<//></td>
          ${stored && html`<td>${each.stage ?? "–"}</td>
          <td><code title=${each.digest}>${each.digest ? each.digest.slice(0, 12) : "–"}</code></td>
          <td class="num">${bytes(each.bytes)}</td><td class="dim">${each.digest ? (each.snapshot ? "snapshot" : "delta") : ""}</td>
          <td class="num">${each.whole_bytes ? percent(each.bytes / each.whole_bytes, 1) : "–"}</td>`}
          <td class="num">${isNumber(each.stall_s) ? `${(1000 * each.stall_s).toFixed(0)} ms` : "–"}</td>
          ${regions.map((name) => html`<td class="num" key=${name}>${after((each.regions ?? {})[name], each.step_done)}</td>`)}
          <td class="num">${after(each.live, each.step_done)}</td>
        </tr>`,
      )}</tbody>
    </table></div>
  </${Card}>`;
}

export function Fleet({ run }) {
  const { data, error } = useData(runPath(run, "fleet"));
  if (!data) return html`<${Loading} error=${error} />`;
  const regions = Object.keys(data.workers);
  const start = Math.min(...regions.map((name) => data.workers[name].t[0] ?? Infinity));
  const lines = (key) => regions.map((name, n) => ({ label: name, x: data.workers[name].t.map((t) => Math.round(t - start)), y: data.workers[name][key].map((value) => (value < 0 ? null : value)), colour: n }));
  const sizes = data.versions.filter((each) => each.digest && !each.snapshot).reverse();
  return html`
    <${Workers} data=${data} />
    <div class="charts four">
      <${Chart} title="Version served" note="by seconds" series=${lines("version")} sync="time" />
      <${Chart} title="Engine busy" note="by seconds" series=${lines("busy")} unit=${percent} range=${() => [0, 1]} sync="time" />
      <${Chart} title="Requests running" note="by seconds" series=${lines("running")} sync="time" />
      <${Chart} title="Delta size" note="by version" series=${[{ label: "delta", x: sizes.map((each) => each.version), y: sizes.map((each) => each.bytes), colour: 0 }]} unit=${bytes} />
    </div>
    <${Versions} run=${run} data=${data} regions=${regions} />
  `;
}
