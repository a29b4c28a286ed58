// One run, or several in the same charts: state, alarms and curves.

import { html } from "/vendor/preact.js";
import { runPath, useAll } from "/api.js";
import { Bars, Chart } from "/chart.js";
import { Alarms, Card, Link, Loading, clock, isNumber, moment, percent, place, short } from "/ui.js";

const last = (values = []) => values.reduce((found, value) => (value == null ? found : value), null);

function Headline({ run }) {
  const { headline, progress } = run;
  return html`<section class=${`headline ${headline.tone}`}>
    <b>${headline.label}</b>
    <p>${headline.text}</p>
    <div class="progress">
      ${progress.map(
        (each) => html`<div key=${each.what}>
          <span>${each.what}${each.eta_s && !run.advice ? `, ${clock(each.eta_s)} to go` : ""}</span>
          ${each.total > 0 && html`<progress value=${each.done} max=${each.total} aria-label=${each.what}></progress>`}
        </div>`,
      )}
    </div>
  </section>`;
}

function Tiles({ run }) {
  const { steps, evals, cost } = run;
  const heldout = evals.filter((each) => each.split === "heldout" && each.samples === 1);
  const newest = heldout[heldout.length - 1];
  const tiles = [
    ["batch reward", short(last(steps.reward), 2), "mean of the newest batch: groups with signal"],
    ["solve rate", percent(last(steps.solve_rate)), "attempts since the previous step"],
    ["held out", newest ? percent(newest.solved / newest.total) : "–", newest ? `${newest.solved} of ${newest.total}, version ${newest.version}` : "not evaluated yet"],
    ["entropy", short(last(steps.entropy), 3), "nats per token"],
    ["k3", short(last(steps.k3_mean)), "trainer vs. engine; alarm above 0.01"],
    ["lag", isNumber(last(steps.lag)) ? `${last(steps.lag)} of ${run.lag_bound}` : "–", "steps, out of those allowed"],
    ["trainer busy", percent(last(steps.trainer_busy)), `${short(last(steps.tokens_per_s))} tokens/s`],
    ["rollouts", short(cost.rollouts || null), `${short(cost.sampled_tokens)} tokens sampled, ${clock(cost.seconds)} h of sessions`.replace(" h of", " of")],
  ];
  return html`<div class="tiles">
    ${tiles.filter(([, value]) => value !== "–").map(
      ([name, value, note]) => html`<div class="tile" key=${name}>
        <span>${name}</span><b>${value}</b><small>${note}</small>
      </div>`,
    )}
  </div>`;
}

function Stages({ run }) {
  return html`<${Card} title="Lineage">
    <ol class="stages">
      ${run.stages.map(
        (each) => html`<li key=${each.stage} class=${each.state.replace(" ", "-")}>
          <b>${each.stage}</b>
          <span>versions ${each.start} → ${each.end}</span>
          <small>${each.state === "done" ? `done in ${clock(each.seconds)}` : each.state === "under way" && run.advice ? `stopped after step ${last(run.steps.step) ?? 0}` : each.state || "pending"}</small>
        </li>`,
      )}
    </ol>
    <table>
      <thead><tr><th>evaluated</th><th>version</th><th>split</th><th class="num">attempts</th><th class="num">solved</th><th class="num">rate</th><th class="num">95 %</th></tr></thead>
      <tbody>
        ${run.evals.map(
          (each) => html`<tr key=${`${each.stage} ${each.split} ${each.version} ${each.samples}`}>
            <td>${each.stage === "start" ? "before training" : `after ${each.stage}`}</td>
            <td>${each.version}</td>
            <td><${Link} to=${place(run.name, "rollouts", { kind: each.split, version: each.version })}>${each.split}<//></td>
            <td class="num">${each.samples}</td>
            <td class="num">${each.solved} / ${each.total}</td>
            <td class="num"><b>${percent(each.solved / each.total, 1)}</b></td>
            <td class="num dim">${percent(each.low, 1)} – ${percent(each.high, 1)}</td>
          </tr>`,
        )}
        ${!run.evals.length && html`<tr><td colspan="7" class="dim">no evaluations yet</td></tr>`}
      </tbody>
    </table>
  </${Card}>`;
}

function Lags({ run }) {
  const rows = (counts) =>
    Object.entries(counts).map(([lag, count]) => ({ name: lag, label: `${lag} ${lag === "1" ? "step" : "steps"}`, value: count }));
  const { in_flight: inFlight, queued } = run.lag_split;
  return html`<${Card} title="Lag of trained rollouts" note=${`${run.lag_bound} allowed`}>
    <div class="halves">
      <div><h3>in flight <small>versions published while it was sampled</small></h3><${Bars} rows=${rows(inFlight)} /></div>
      <div><h3>queued <small>versions between its last token and its step</small></h3><${Bars} rows=${rows(queued)} /></div>
    </div>
  </${Card}>`;
}

function PastAlarms({ run }) {
  if (!run.past_alarms.length) return null;
  return html`<details class="card">
    <summary>${run.past_alarms.length} alarms so far</summary>
    ${run.past_alarms.map(
      (each) => html`<p key=${each.t}><span class="dim">${moment(each.t)}</span> <b>${each.name}</b> ${each.what} <span class="dim">${each.advice}</span></p>`,
    )}
  </details>`;
}

// The curves of all runs in one chart: one colour per run, its second curve dashed, others dotted.
function curves(found, order, names, of = (run) => run.steps) {
  const many = found.length > 1;
  return found.flatMap((run) =>
    names.map(([name, label], n) => ({
      label: many ? `${run.name}${names.length > 1 ? ` ${label}` : ""}` : label,
      x: of(run).step,
      y: of(run)[name] ?? [],
      colour: many ? order[run.name] : n,
      stroke: many ? n : 0,
    })),
  );
}

// The same for curves that differ between runs: `of` returns [label, x, y] of each, the main one first.
function ownCurves(found, order, of) {
  const many = found.length > 1;
  return found
    .flatMap((run) => of(run).map(([label, x, y], n) => ({ run, label, x, y, stroke: many ? n : 0 })))
    .map(({ run, label, ...each }, n) => ({ ...each, label: many ? `${run.name} ${label}` : label, colour: many ? order[run.name] : n }));
}

const busyCurves = ({ steps }) => [
  ["trainer", steps.step, steps.trainer_busy ?? []],
  ...Object.keys(steps).filter((name) => name.startsWith("busy ")).map((name) => [name.slice(5), steps.step, steps[name]]),
];

const solveCurves = ({ solve }) =>
  Object.entries(solve)
    .sort(([one], [other]) => other.startsWith("train") - one.startsWith("train"))
    .map(([kind, { version, rate }]) => [kind.replace(/^train .*:/, "train "), version, rate]);

const fitCurves = ({ fits }) => Object.entries(fits).map(([stage, { step, loss }]) => [stage, step, loss]);

function Charts({ found, order }) {
  const all = (names) => curves(found, order, names);
  const unit = (u, low, high) => [Math.min(0, low ?? 0), Math.max(1, high ?? 1)];
  const share = (u, low, high) => [0, Math.max(0.01, high ?? 0)];
  const own = (of) => ownCurves(found, order, of);
  const fits = own(fitCurves);
  const steps = found.some((run) => run.steps.step.length);
  const supervised = fits.length > 0 && html`<${Chart} title="Loss of supervised stages" series=${fits} sync="fit" />`;
  if (!steps) return html`<div class="charts">${supervised || html`<p class="empty">no steps yet</p>`}</div>`;
  return html`<div class="charts">
    <${Chart} title="Mean reward of batches" series=${all([["reward", "reward"]])} range=${unit} />
    <${Chart} title="Solve rate by kind" note="by sampling version" series=${own(solveCurves)} unit=${percent} range=${unit} sync="version" />
    <${Chart} title="Entropy" note="nats per token" series=${all([["entropy", "entropy"]])} />
    <${Chart} title="k3, trainer vs. engine" series=${all([["k3_mean", "mean"], ["k3_p99", "p99"]])} log />
    <${Chart} title="Lag" note="steps" series=${all([["lag", "oldest token"]])} range=${(u, low, high) => [0, Math.max(1, (high ?? 0) + 0.5)]} />
    <${Chart} title="Busy share" series=${own(busyCurves)} unit=${percent} range=${() => [0, 1]} />
    <${Chart} title="Trainer tokens/s" series=${all([["tokens_per_s", "tokens/s"]])} />
    <${Chart} title="Gradient norm" series=${all([["grad_norm", "norm"]])} />
    <${Chart} title="Corrected and zero-gradient tokens" series=${all([["corrected_frac", "corrected"], ["zero_grad_frac", "zero gradient"]])} unit=${(v) => percent(v, 1)} range=${share} />
    ${supervised}
  </div>`;
}

export function RunView({ runs, order }) {
  const { data, error } = useAll(runs.map((run) => runPath(run, "overview")));
  if (!data.length) return html`<${Loading} error=${error} />`;
  const one = data.length === 1;
  const name = (run) => !one && html`<h1><i class=${`dot c${order[run.name] % 8}`}></i>${run.name}</h1>`;
  return html`
    ${data.map(
      (run) => html`<div class="runhead" key=${run.name}>
        ${name(run)}
        <${Alarms} alarms=${run.alarms} advice=${run.finished ? null : run.advice} missing=${run.missing} />
        <${Headline} run=${run} />
        ${one && html`<${Tiles} run=${run} />`}
      </div>`,
    )}
    <${Charts} found=${data} order=${order} />
    ${data.map(
      (run) => html`<div class="runhead" key=${run.name}>
        ${name(run)}
        <div class="halves">
          <${Stages} run=${run} />
          <${Lags} run=${run} />
        </div>
        <${PastAlarms} run=${run} />
      </div>`,
    )}
  `;
}
