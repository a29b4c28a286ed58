// Small components that all views use. All text goes through Preact, which never turns it into markup.

import { html, useEffect, useLayoutEffect, useState } from "/vendor/preact.js";

// Locations: a path and its query.

export function go(path, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", path);
  dispatchEvent(new PopStateEvent("popstate"));
}

export function place(run, view = "", query = {}) {
  const parts = view ? `/${view.split("/").map(encodeURIComponent).join("/")}` : "";
  const asked = new URLSearchParams(
    Object.entries(query).filter(([, value]) => value !== "" && value != null),
  ).toString();
  return `/runs/${encodeURIComponent(run)}${parts}${asked ? `?${asked}` : ""}`;
}

export function Link({ to, children, ...rest }) {
  const follow = (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    event.preventDefault();
    go(to);
  };
  return html`<a href=${to} onClick=${follow} ...${rest}>${children}</a>`;
}

// Numbers and times.

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function short(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size && size < 0.001) return value.toExponential(1);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return Number.isInteger(value) ? String(value) : value.toFixed(size >= 100 ? 0 : digits);
}

export const percent = (value, digits = 0) =>
  isNumber(value) ? `${(100 * value).toFixed(digits)}%` : "–";

export function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 1000 && power < units.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${value.toFixed(power && value < 100 ? 1 : 0)} ${units[power]}`;
}

export function clock(seconds) {
  if (!isNumber(seconds)) return "–";
  const s = Math.floor(seconds);
  const tail = `${String(Math.floor(s / 60) % 60).padStart(s >= 3600 ? 2 : 1, "0")}:${String(s % 60).padStart(2, "0")}`;
  return s >= 3600 ? `${Math.floor(s / 3600)}:${tail}` : tail;
}

export const moment = (t) => (t ? new Date(1000 * t).toLocaleString() : "–");

// Components.

export function Card({ title, note, children, className = "" }) {
  return html`<section class=${`card ${className}`}>
    ${title && html`<h2>${title}${note && html`<span class="note">${note}</span>`}</h2>`}
    ${children}
  </section>`;
}

const TONES = { done: "good", truncated: "warn", timeout: "warn", failed: "bad", trained: "good" };

export const Chip = ({ children, tone }) =>
  html`<span class=${`chip ${tone ?? TONES[children] ?? ""}`}>${children}</span>`;

export function Reward({ value }) {
  if (!isNumber(value)) return html`<span class="dim">none</span>`;
  const share = Math.max(0, Math.min(1, value));
  const tone = value >= 1 ? "good" : value > 0 ? "warn" : "bad";
  return html`<span class="reward"><span class=${`meter ${tone}`}><i style=${{ width: `${100 * share}%` }}></i></span>${short(value, 2)}</span>`;
}

// The fate of a rollout, in the words of `etude sessions`.
export function Became({ run, row, ...rest }) {
  if (row.step == null) return row.became;
  const told = row.became === "trained" ? `step ${row.step}` : `in step ${row.step}, not done yet`;
  return html`<${Link} to=${place(run, "rollouts", { step: row.step })} ...${rest}>${told}<//>`;
}

export function Bar({ share, tone = "" }) {
  return html`<span class="bar"><i class=${tone} style=${{ width: `${Math.max(0.5, 100 * Math.min(1, share || 0))}%` }}></i></span>`;
}

export function Problem({ error }) {
  return html`<p class="problem" role="alert">${error.message}</p>`;
}

export function Loading({ error }) {
  return error ? html`<${Problem} error=${error} />` : html`<p class="loading">reading …</p>`;
}

export function Alarms({ alarms = [], advice, missing = [] }) {
  if (!alarms.length && !advice && !missing.length) return null;
  return html`<div class="alarms" role="alert">
    ${advice && html`<div class="alarm"><b>stopped</b><p>${advice}</p></div>`}
    ${alarms.map(
      (each) => html`<div class="alarm" key=${each.name}>
        <b>${each.name}</b>
        <p>${each.what}</p>
        <p class="todo">${each.advice}</p>
      </div>`,
    )}
    ${missing.length > 0 &&
    html`<div class="alarm missing">
      <b>missing</b>
      ${missing.slice(0, 6).map((each) => html`<p>${each}</p>`)}
      ${missing.length > 6 && html`<p class="dim">and ${missing.length - 6} more</p>`}
    </div>`}
  </div>`;
}

// Keyboard shortcuts: {key: handler}, disabled while the user types.
export function useKeys(keys) {
  useLayoutEffect(() => {
    const press = (event) => {
      const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
      if (typing || event.metaKey || event.ctrlKey || event.altKey) return;
      if (keys[event.key]) {
        event.preventDefault();
        keys[event.key]();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  });
}

// A debounced copy of `value`.
export function useRested(value, ms = 200) {
  const [rested, setRested] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setRested(value), ms);
    return () => clearTimeout(timer);
  }, [value, ms]);
  return rested;
}
