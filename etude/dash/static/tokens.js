// The tokens of a session: their probabilities, the trainer's disagreement, and their weight versions.

import { html, useState } from "/vendor/preact.js";
import { runPath, useData } from "/api.js";
import { Loading, go, place, short } from "/ui.js";

const PAGE = 4000;
const HEATS = 10;

const unroll = (spans) => spans.flatMap(([value, count]) => Array(count).fill(value));

// 0 for a certain token, 9 for a probability of 0.001 or less.
const surprise = (logprob) => Math.min(HEATS - 1, Math.floor((-logprob / Math.log(1000)) * HEATS));
// The same for a difference of log-probs, on a scale of decades from 0.0001 to 1.
const distance = (d) => (d < 1e-4 ? 0 : Math.min(HEATS - 1, Math.floor(((Math.log10(d) + 4) / 4) * HEATS)));

function Ribbon({ versions }) {
  const all = versions.reduce((sum, [, count]) => sum + count, 0) || 1;
  return html`<div class="ribbon" role="img" aria-label=${`weight versions: ${versions.map(([version, count]) => `${count} tokens of ${version}`).join(", ")}`}>
    ${versions.map(([version, count], n) => html`<span key=${n} class=${`v${version % 6}`} style=${{ flexGrow: count, flexBasis: `${(100 * count) / all}%` }} title=${`version ${version}: ${count} sampled tokens`}>${version}</span>`)}
  </div>`;
}

function Spans({ data, colour }) {
  const mask = unroll(data.mask);
  const versions = unroll(data.versions);
  let n = 0;
  return html`<div class="tokens">
    ${data.tokens.map((piece, at) => {
      const text = data.pieces[piece];
      const shown = text.replace(/\n/g, "⏎\n");
      if (!mask[at]) return html`<span class="given" key=${at}>${shown}</span>`;
      const engine = data.logprobs[n];
      const trainer = data.trainer ? data.trainer[n] : null;
      const version = versions[n];
      n += 1;
      const heat = colour === "difference" && trainer != null ? distance(Math.abs(trainer - engine)) : surprise(engine);
      const told = `${JSON.stringify(text)}  p ${short(Math.exp(engine))}  log-prob ${short(engine)}${trainer == null ? "" : `  trainer ${short(trainer)}`}  version ${version}`;
      return html`<span class=${`said h${heat} v${version % 6}`} title=${told} key=${at}>${shown}</span>`;
    })}
  </div>`;
}

export function Tokens({ run, id, query }) {
  const [colour, setColour] = useState("logprob");
  const segment = Number(query.segment ?? 0);
  const offset = Number(query.offset ?? 0);
  const { data, error } = useData(runPath(run, `sessions/${encodeURIComponent(id)}/tokens?segment=${segment}&offset=${offset}&limit=${PAGE}${colour === "difference" ? "&trainer=true" : ""}`), 0);
  if (!data) return html`<${Loading} error=${error} />`;
  if (!data.segments.length) return html`<p class="empty">${data.not_stored ?? "no tokens of this session are stored: evaluations store only the conversation"}</p>`;
  const set = (change) => go(place(run, `sessions/${id}`, { ...query, ...change }), { replace: true });
  const here = data.segments[segment];
  return html`<section class="card">
    <div class="toolbar">
      ${data.segments.length > 1 &&
      html`<label>context <select value=${segment} onChange=${(event) => set({ segment: event.target.value, offset: "" })}>
        ${data.segments.map((each, n) => html`<option value=${n} key=${n}>${n}: ${each.kind}${each.parent == null ? "" : ` after ${each.parent}`}, ${(each.prompt + each.tokens).toLocaleString()} tokens</option>`)}
      </select></label>`}
      <span role="group" aria-label="colour">
        colour by
        <button type="button" aria-pressed=${colour === "logprob"} onClick=${() => setColour("logprob")}>surprise</button>
        <button type="button" aria-pressed=${colour === "difference"} disabled=${!data.trained} title=${data.trained ? "" : "this session was not trained on"} onClick=${() => setColour("difference")}>trainer − engine</button>
      </span>
      <span class="scale">${colour === "logprob" ? "certain" : "0.0001"}${Array.from({ length: HEATS }, (_, n) => html`<i class=${`h${n}`} key=${n}></i>`)}${colour === "logprob" ? "1 in 1,000" : "1 nat"}</span>
      <span class="dim">${here.sampled.toLocaleString()} of ${(here.prompt + here.tokens).toLocaleString()} tokens sampled; pale tokens were given to the model</span>
    </div>
    ${colour === "difference" && !data.trainer && html`<p class="problem">the trainer's log-probs of these tokens are not stored</p>`}
    <${Ribbon} versions=${here.versions} />
    <${Spans} data=${data} colour=${colour} />
    ${data.total > PAGE &&
    html`<div class="pager">
      <button type="button" disabled=${offset === 0} onClick=${() => set({ offset: Math.max(0, offset - PAGE) || "" })}>previous</button>
      <span>tokens ${(offset + 1).toLocaleString()} to ${Math.min(data.total, offset + PAGE).toLocaleString()} of ${data.total.toLocaleString()}</span>
      <button type="button" disabled=${offset + PAGE >= data.total} onClick=${() => set({ offset: offset + PAGE })}>next</button>
    </div>`}
  </section>`;
}
