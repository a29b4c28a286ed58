// All rollouts of a run: filters on the left, a table, and files for other programs.

import { html, useEffect, useRef, useState } from "/vendor/preact.js";
import { download, runPath, useData } from "/api.js";
import { Histogram } from "/chart.js";
import { Became, Chip, Link, Loading, Reward, clock, go, place, short, useKeys, useRested } from "/ui.js";

const PAGE = 100;
const RANGES = [["reward", "reward"], ["length", "tokens"], ["turns", "turns"], ["seconds", "seconds"]];
const EXACT = [["task", "task"], ["group", "group"], ["step", "step"], ["version", "version"], ["cause", "cause"]];
const FACETS = [["status", "status"], ["kind", "split"], ["became", "outcome"], ["flag", "flag"], ["source", "environment"], ["stage", "stage"]];
const FORMATS = ["jsonl", "csv", "parquet", "sessions.jsonl", "atif.jsonl", "preferences.jsonl"];

function Facet({ name, title, counts, chosen, set }) {
  const entries = Object.entries(counts).filter(([value]) => value);
  if (!entries.length || (entries.length === 1 && !chosen)) return null;
  return html`<fieldset>
    <legend>${title}</legend>
    ${entries.slice(0, 12).map(
      ([value, count]) => html`<button type="button" class="facet" key=${value} aria-pressed=${chosen === value} onClick=${() => set({ [name]: chosen === value ? "" : value })}>
        <span>${value}</span><b>${count.toLocaleString()}</b>
      </button>`,
    )}
  </fieldset>`;
}

function Range({ name, title, query, set }) {
  const field = (end) => html`<input
    type="number"
    step="any"
    aria-label=${`${title} ${end === "min" ? "at least" : "at most"}`}
    placeholder=${end === "min" ? "from" : "to"}
    value=${query[`${name}_${end}`] ?? ""}
    onChange=${(event) => set({ [`${name}_${end}`]: event.target.value })}
  />`;
  return html`<div class="range"><span>${title}</span>${field("min")}${field("max")}</div>`;
}

function Filters({ data, query, set }) {
  const pick = (name) => (low, high) => set({ [`${name}_min`]: Number(low.toPrecision(6)), [`${name}_max`]: Number(high.toPrecision(6)) });
  return html`<aside class="filters" aria-label="filters">
    <${Histogram} title="reward" ...${data.rewards} onPick=${pick("reward")} />
    <${Histogram} title="tokens" ...${data.lengths} onPick=${pick("length")} />
    ${RANGES.map(([name, title]) => html`<${Range} key=${name} name=${name} title=${title} query=${query} set=${set} />`)}
    ${FACETS.map(([name, title]) => html`<${Facet} key=${name} name=${name} title=${title} counts=${data.facets[name] ?? {}} chosen=${query[name]} set=${set} />`)}
    ${EXACT.map(
      ([name, title]) => html`<label class="exact" key=${name}><span>${title}</span>
        <input value=${query[name] ?? ""} onChange=${(event) => set({ [name]: event.target.value })} /></label>`,
    )}
  </aside>`;
}

const COLUMNS = [
  ["", "session"], ["", "task"], ["", "status"], ["reward", "reward"], ["length", "tokens"], ["turns", "turns"],
  ["seconds", "time"], ["", "versions"], ["step", "became"], ["", ""],
];

function Head({ sort, set }) {
  return html`<thead><tr>
    ${COLUMNS.map(([name, title], n) => {
      if (!name) return html`<th key=${n}>${title || html`<span class="hidden">notes</span>`}</th>`;
      const down = sort === `-${name}`;
      const up = sort === name;
      const next = down ? name : up ? "new" : `-${name}`;
      return html`<th key=${n} class="num" aria-sort=${down ? "descending" : up ? "ascending" : undefined}>
        <button type="button" onClick=${() => set({ sort: next })}>${title}${down ? " ↓" : up ? " ↑" : ""}</button>
      </th>`;
    })}
  </tr></thead>`;
}

const span = (versions) =>
  !versions.length ? "" : versions.length === 1 ? versions[0] : `${versions[0]}–${versions[versions.length - 1]}`;

function Row({ run, row, chosen }) {
  const session = place(run, `sessions/${row.id}`);
  return html`<tr class=${chosen ? "chosen" : ""} onClick=${(event) => event.target.closest("a") || go(session)}>
    <td><${Link} to=${session}>${row.id}<//></td>
    <td><${Link} to=${place(run, "rollouts", { task: row.task })} class="plain">${row.task}<//></td>
    <td><${Chip}>${row.status}<//></td>
    <td class="num"><${Reward} value=${row.reward} /></td>
    <td class="num">${row.length ? row.length.toLocaleString() : "–"}</td>
    <td class="num">${row.turns || "–"}</td>
    <td class="num">${row.seconds < 60 ? `${row.seconds.toFixed(1)} s` : clock(row.seconds)}</td>
    <td class="num">${span(row.versions)}</td>
    <td><${Became} run=${run} row=${row} class="plain" /></td>
    <td class="notes">${row.flags.map((flag) => html`<${Chip} key=${flag} tone="bad">${flag}<//>`)}${row.error && html`<span class="error">${row.error}</span>`}</td>
  </tr>`;
}

export function Rollouts({ run, query }) {
  const [text, setText] = useState(query.text ?? "");
  const [chosen, choose] = useState(-1);
  const search = useRef(null);
  const rested = useRested(text);
  const offset = Number(query.offset ?? 0);
  const sort = query.sort ?? "new";

  const set = (change, options) => go(place(run, "rollouts", { ...query, offset: "", ...change }), options);
  useEffect(() => {
    if (rested !== (query.text ?? "")) set({ text: rested }, { replace: true });
  }, [rested]);

  const { offset: _, sort: __, ...filter } = query;
  const asked = new URLSearchParams(filter);
  const { data, error } = useData(runPath(run, `rollouts?${new URLSearchParams({ ...filter, sort, offset, limit: PAGE })}`));

  const shown = useRef(null);
  if (data) shown.current = data;
  const found = shown.current;

  const move = (by) => () => found && choose((n) => Math.max(0, Math.min(found.rows.length - 1, n + by)));
  useKeys({
    "/": () => search.current && search.current.focus(),
    j: move(1),
    k: move(-1),
    Enter: () => found && found.rows[chosen] && go(place(run, `sessions/${found.rows[chosen].id}`)),
  });

  if (!found) return html`<${Loading} error=${error} />`;
  const active = Object.keys(filter).length;
  return html`<div class="withside">
    <${Filters} data=${found} query=${query} set=${set} />
    <section>
      <div class="toolbar">
        <input ref=${search} type="search" aria-label="text in id, task, error or flag" placeholder="text in id, task, error or flag   ( / )" value=${text} onInput=${(event) => setText(event.target.value)} />
        <span><b>${found.matched.toLocaleString()}</b> of ${found.total.toLocaleString()} rollouts</span>
        ${active > 0 && html`<button type="button" onClick=${() => { setText(""); go(place(run, "rollouts")); }}>all</button>`}
        <${Link} to=${place(run, "failures", filter)}>failures by cause<//>
        <span class="exports">export ${FORMATS.map((format) => html`<button type="button" key=${format} onClick=${() => download(runPath(run, `export?format=${format}&${asked}`), `${run}.rollouts.${format}`)}>${format}</button>`)}</span>
      </div>
      ${error && html`<p class="problem" role="alert">${error.message}</p>`}
      <div class="scroll" tabindex="0" role="region" aria-label="rollouts">
        <table class="rollouts">
          <${Head} sort=${sort} set=${set} />
          <tbody>${found.rows.map((row, n) => html`<${Row} key=${row.id} run=${run} row=${row} chosen=${n === chosen} />`)}</tbody>
        </table>
      </div>
      <div class="pager">
        <button type="button" disabled=${offset === 0} onClick=${() => set({ offset: Math.max(0, offset - PAGE) || "" })}>newer</button>
        <span>${found.matched ? `${offset + 1} to ${Math.min(offset + PAGE, found.matched)}` : "none"}</span>
        <button type="button" disabled=${offset + PAGE >= found.matched} onClick=${() => set({ offset: offset + PAGE })}>further</button>
      </div>
    </section>
  </div>`;
}
