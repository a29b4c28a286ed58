// The page: views by path, navigation, theme and keys.

import { html, render, useEffect, useState } from "/vendor/preact.js";
import { hasToken, setToken, useData } from "/api.js";
import { Link, Loading, go, place, useKeys } from "/ui.js";
import { Compare } from "/compare.js";
import { Doctor } from "/doctor.js";
import { Failures } from "/failures.js";
import { Fleet } from "/fleet.js";
import { Group } from "/group.js";
import { Ledger } from "/ledger.js";
import { Realtime } from "/realtime.js";
import { Review } from "/review.js";
import { Rollouts } from "/rollouts.js";
import { RunView } from "/run.js";
import { Session } from "/session.js";

const VIEWS = [
  ["", "Run", RunView],
  ["rollouts", "Rollouts", Rollouts],
  ["failures", "Failures", Failures],
  ["ledger", "Ledger", Ledger],
  ["fleet", "Fleet", Fleet],
  ["doctor", "Doctor", Doctor],
  ["review", "Review", Review],
  ["compare", "Compare", Compare],
  ["realtime", "Real-time", Realtime],
];
const PAGES = { ...Object.fromEntries(VIEWS.map(([path, , view]) => [path, view])), sessions: Session, groups: Group };
const KEYS = [
  ["1 … 9", "switch views, from Run to Real-time"],
  ["/", "search"],
  ["j k", "move down and up a list"],
  ["Enter", "open the selected row"],
  ["[ ]", "previous and next session of the group"],
  ["c t", "conversation or tokens of a session"],
  ["← = →", "choose left, tie or right when comparing"],
  ["d", "switch between dark and light"],
  ["?", "show this list"],
];

function read() {
  const [, , names = "", view = "", ...rest] = location.pathname.split("/").map(decodeURIComponent);
  return {
    runs: names.split(",").filter(Boolean),
    view,
    id: rest.join("/"),
    query: Object.fromEntries(new URLSearchParams(location.search)),
  };
}

const THEME = "etude-theme";

function startTheme() {
  const wanted = localStorage.getItem(THEME);
  const dark = wanted ? wanted === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

function otherTheme() {
  const now = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = now;
  localStorage.setItem(THEME, now);
}

function RunChoice({ all, chosen, view }) {
  if (all.length < 2) return html`<span class="runname">${chosen[0]}</span>`;
  const toggle = (name) => {
    const next = chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name];
    if (next.length) go(place(next.join(","), view in PAGES && !["sessions", "groups"].includes(view) ? view : ""));
  };
  return html`<span class="runs" role="group" aria-label="runs">
    ${all.map(
      (run) => html`<button
        type="button"
        key=${run.name}
        aria-pressed=${chosen.includes(run.name)}
        title=${run.url}
        onClick=${() => toggle(run.name)}
      ><i class=${`dot c${all.indexOf(run) % 8}`}></i>${run.name}</button>`,
    )}
  </span>`;
}

function AskToken() {
  const [token, set] = useState("");
  const send = (event) => {
    event.preventDefault();
    setToken(token.trim());
  };
  return html`<main class="login">
    <h1>etude</h1>
    <p>Enter the token that this dashboard was started with.</p>
    <form onSubmit=${send}>
      <label>token <input type="password" autocomplete="off" value=${token} onInput=${(e) => set(e.target.value)} /></label>
      <button>continue</button>
    </form>
    ${hasToken() && html`<p class="problem">this token is not valid</p>`}
  </main>`;
}

function Help({ close }) {
  return html`<div class="help" role="dialog" aria-label="keys" onClick=${close}>
    <div class="card">
      <h2>Keys</h2>
      <dl>${KEYS.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl>
    </div>
  </div>`;
}

function App() {
  const [at, setAt] = useState(read());
  const [help, setHelp] = useState(false);
  const [, redraw] = useState(0);
  const { data, error } = useData("/api/runs", 5000);

  useEffect(() => {
    const moved = () => setAt(read());
    addEventListener("popstate", moved);
    return () => removeEventListener("popstate", moved);
  }, []);

  const all = data ? data.runs : [];
  const names = all.map((run) => run.name);
  const chosen = at.runs.filter((name) => names.includes(name));
  const runs = chosen.length ? chosen : names.slice(0, at.runs.length ? 0 : 1);

  // only a run that learns from users has this view
  const learns = all.some((run) => runs.includes(run.name) && run.realtime);
  const views = VIEWS.filter(([path]) => path !== "realtime" || learns);

  const turn = () => {
    otherTheme();
    redraw((n) => n + 1);
  };
  const keys = { d: turn, "?": () => setHelp(!help), Escape: () => setHelp(false) };
  views.forEach(([path], n) => {
    keys[n + 1] = () => go(place(runs.join(","), path));
  });
  useKeys(keys);

  const title = (VIEWS.find(([path]) => path === at.view) ?? [0, at.id || "etude"])[1];
  useEffect(() => {
    document.title = `${title} · ${runs.join(", ")} · etude`;
  }, [title, runs.join()]);

  if (error && error.status === 401) return html`<${AskToken} />`;
  if (!data) return html`<main><${Loading} error=${error} /></main>`;
  const View = PAGES[at.view];
  const order = Object.fromEntries(names.map((name, n) => [name, n]));
  return html`
    <a class="skip" href="#main">skip to content</a>
    <header>
      <${Link} to=${place(runs.join(","))} class="logo">étude<//>
      <${RunChoice} all=${all} chosen=${runs} view=${at.view} />
      <nav aria-label="views">
        ${views.map(
          ([path, name]) =>
            html`<${Link} key=${path} to=${place(runs.join(","), path)} aria-current=${at.view === path ? "page" : undefined}>${name}<//>`,
        )}
      </nav>
      <button type="button" class="icon" title="dark or light (d)" aria-label="dark or light" onClick=${turn}>◐</button>
      <button type="button" class="icon" title="keys (?)" aria-label="keys" onClick=${() => setHelp(true)}>?</button>
    </header>
    <main id="main">
      ${error && html`<p class="problem" role="alert">${error.message}: showing the last data that was read</p>`}
      ${!runs.length
        ? html`<p class="problem">there is no run ${at.runs.join(", ")} here, only ${names.join(", ")}</p>`
        : View
          ? html`<${View} key=${`${runs.join()} ${at.view} ${at.id}`} runs=${runs} run=${runs[0]} order=${order} id=${at.id} query=${at.query} writes=${data.writes} />`
          : html`<p class="problem">there is no view ${at.view}</p>`}
    </main>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}
  `;
}

startTheme();
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
