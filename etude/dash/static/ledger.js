// Fates of all samples ever issued, and a comparison of the trained samples with the dispatched ones.

import { html } from "/vendor/preact.js";
import { runPath, useData } from "/api.js";
import { Bar, Card, Link, Loading, percent, place } from "/ui.js";

function Equation({ data }) {
  const dropped = Object.values(data.dropped).reduce((sum, count) => sum + count, 0);
  const holds = data.issued === data.trained + dropped + data.in_flight;
  const parts = [["trained", data.trained], ["dropped", dropped], ["flying", data.in_flight]];
  return html`<${Card} title="Every sample, once" note=${holds ? "the equation holds" : "the equation does not hold: run `etude audit`"}>
    <p class="equation"><b>${data.issued.toLocaleString()}</b> issued = <b class="good">${data.trained.toLocaleString()}</b> trained + <b class="warn">${dropped.toLocaleString()}</b> dropped + <b class="accent">${data.in_flight.toLocaleString()}</b> in flight</p>
    <div class="stack" role="img" aria-label="shares of trained, dropped and in flight">${parts.map(([name, count]) => count > 0 && html`<i key=${name} class=${name} style=${{ flexGrow: count }} title=${`${name === "flying" ? "in flight" : name}: ${count}`}></i>`)}</div>
  </${Card}>`;
}

function Shares({ title, note, rows, all }) {
  const most = Math.max(1, ...rows.map((row) => row.dispatched));
  return html`<${Card} title=${title} note=${note}>
    <table>
      <thead><tr><th></th><th class="num">dispatched</th><th><span class="hidden">share</span></th><th class="num">trained</th><th class="num">share</th><th class="num">vs. all</th></tr></thead>
      <tbody>${rows.map((row) => {
        const share = row.trained / row.dispatched;
        const skew = share - all;
        return html`<tr key=${row.name}>
          <td title=${row.name}>${row.name.replace(/^[\w.]+:(?=\w+$)/, "")}</td><td class="num">${row.dispatched.toLocaleString()}</td>
          <td class="fit"><${Bar} share=${row.dispatched / most} /></td>
          <td class="num">${row.trained.toLocaleString()}</td><td class="num">${percent(share)}</td>
          <td class=${`num ${Math.abs(skew) > 0.15 ? "warn" : "dim"}`}>${skew >= 0 ? "+" : "−"}${percent(Math.abs(skew))}</td>
        </tr>`;
      })}</tbody>
    </table>
  </${Card}>`;
}

export function Ledger({ run }) {
  const { data, error } = useData(runPath(run, "ledger"));
  if (!data) return html`<${Loading} error=${error} />`;
  const sum = (key) => data.by_status.reduce((total, row) => total + row[key], 0);
  const all = sum("dispatched") ? sum("trained") / sum("dispatched") : 0;
  const reasons = Object.entries(data.dropped);
  return html`
    <${Equation} data=${data} />
    <div class="halves">
      <${Card} title="Dropped" note="by reason">
        <table><tbody>
          ${reasons.map(([reason, count]) => html`<tr key=${reason}><td><${Link} to=${place(run, "rollouts", { became: reason })}>${reason}<//></td><td class="num"><b>${count.toLocaleString()}</b></td><td class="fit"><${Bar} share=${count / reasons[0][1]} tone="warn" /></td></tr>`)}
          ${!reasons.length && html`<tr><td class="dim">none</td></tr>`}
        </tbody></table>
      </${Card}>
      <${Shares} title="By reward" note="which rollouts are not trained on" rows=${data.by_reward} all=${all} />
    </div>
    <${Shares} title="By length" note=${`trained vs. dispatched, in tokens; ${percent(all)} of all ${data.settled.toLocaleString()} settled rollouts were trained on. Long ones that are dropped more often are a selection bias`} rows=${data.by_length} all=${all} />
    <div class="halves"><${Shares} title="By environment" rows=${data.by_source} all=${all} /><${Shares} title="By status" rows=${data.by_status} all=${all} /></div>
  `;
}
