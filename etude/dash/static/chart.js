// Charts by uPlot: lines over steps, with a legend that shows the values under the cursor.

import { html, useEffect, useRef, useState } from "/vendor/preact.js";
import { Card, short } from "/ui.js";

const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const HEIGHT = 168;

export const colour = (n) =>
  getComputedStyle(document.documentElement).getPropertyValue(COLOURS[n % COLOURS.length]).trim();

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// On a logarithmic scale, values far below the others are drawn at the bottom.
function usable(y, log) {
  if (!log) return y.map((value) => value ?? null);
  const floor = Math.max(...y.map((value) => value ?? 0)) / 1e5;
  return y.map((value) => (value == null ? null : Math.max(value, floor) || null));
}

const powers = (u, marks) => marks.map((v) => (v && Number.isInteger(Math.round(1e6 * Math.log10(v)) / 1e6) ? v.toExponential(0) : ""));

// A single step is drawn in the middle.
const spread = (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]);

// Dash patterns of the lines of one colour; all further lines share the last.
const STROKES = [{ name: "", dash: undefined }, { name: "dashed", dash: [6, 4] }, { name: "dotted", dash: [2, 3] }];
const strokeOf = (n = 0) => STROKES[Math.min(n, STROKES.length - 1)];

// series: [{label, x, y, colour, stroke}], where `stroke` counts the lines of that colour
export function Chart({ title, note, series, log = false, unit = short, range, sync = "step" }) {
  const box = useRef(null);
  const plot = useRef(null);
  const [cursor, setCursor] = useState(null);
  const drawn = series.filter((each) => each.y && each.y.some((value) => value != null));
  const theme = document.documentElement.dataset.theme;
  const shape = JSON.stringify([theme, log, drawn.map((each) => [each.label, each.colour])]);

  const tables = drawn.map((each) => [each.x, usable(each.y, log)]);
  const data = tables.length ? uPlot.join(tables) : null;

  useEffect(() => {
    if (!data || !box.current) return undefined;
    const axis = {
      stroke: css("--dim"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: css("--line"), width: 1 },
      ticks: { stroke: css("--line"), width: 1, size: 4 },
    };
    const options = {
      width: box.current.clientWidth || 320,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: sync }, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: spread }, y: { distr: log ? 3 : 1, range } },
      axes: [
        { ...axis, size: 28, values: (u, marks) => marks.map((v) => (Number.isInteger(v) ? v : "")) },
        {
          ...axis,
          size: 52,
          grid: { ...axis.grid, show: !log },
          ticks: { ...axis.ticks, show: !log },
          values: log ? powers : (u, marks) => marks.map((v) => (v == null ? "" : unit === short && Math.abs(v) < 1e4 ? Number(v.toPrecision(3)) : unit(v))),
        },
      ],
      series: [
        {},
        ...drawn.map((each) => ({
          label: each.label,
          stroke: colour(each.colour),
          width: 1.8,
          dash: strokeOf(each.stroke).dash,
          spanGaps: true,
          points: { show: each.x.length < 3, size: 6 },
        })),
      ],
      hooks: {
        setCursor: [(u) => setCursor(u.cursor.idx ?? null)],
      },
    };
    plot.current = new uPlot(options, data, box.current);
    const observer = new ResizeObserver(() => {
      if (box.current) plot.current.setSize({ width: box.current.clientWidth, height: HEIGHT });
    });
    observer.observe(box.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape, Boolean(data)]);

  const told = JSON.stringify(data && data.map((row) => [row.length, row[row.length - 1]]));
  useEffect(() => {
    if (plot.current && data) plot.current.setData(data);
  }, [told]);

  const last = (row) => row.reduce((found, value) => (value == null ? found : value), null);
  const value = (n) => (cursor == null ? last(data[n + 1]) : data[n + 1][cursor]);
  if (!data) return null;
  return html`<${Card} className="chart" title=${title} note=${note}>
    <p class="legend">
      ${drawn.map(
        (each, n) =>
          html`<span key=${each.label}
            ><i class=${strokeOf(each.stroke).name} style=${{ borderColor: colour(each.colour) }}></i>${each.label} <b>${unit(value(n))}</b></span
          >`,
      )}
      ${cursor != null && html`<span class="dim">at ${short(data[0][cursor])}</span>`}
    </p>
    <div class="plot" ref=${box} role="img" aria-label=${`chart of ${title}`}></div>
  </${Card}>`;
}

// rows: [{name, value, tone, onPick}]; the bar of the largest value has the full width.
export function Bars({ rows, unit = short }) {
  const most = Math.max(1e-9, ...rows.map((row) => row.value));
  return html`<div class="bars">
    ${rows.map(
      (row) => html`<div class="barrow" key=${row.name}>
        <span class="barname">${row.label ?? row.name}</span>
        <span class="bar"><i class=${row.tone ?? ""} style=${{ width: `${(100 * row.value) / most}%` }}></i></span>
        <b>${unit(row.value)}</b>
      </div>`,
    )}
  </div>`;
}

export function Histogram({ title, edges, counts, onPick }) {
  if (!counts || !counts.length) return null;
  const most = Math.max(...counts, 1);
  return html`<div class="histogram">
    <p class="dim">${title}</p>
    <div class="columns">
      ${counts.map(
        (count, n) => html`<button
          type="button"
          key=${n}
          title=${`${short(edges[n])} to ${short(edges[n + 1])}: ${count}`}
          aria-label=${`${title} ${short(edges[n])} to ${short(edges[n + 1])}: ${count} rollouts`}
          onClick=${() => onPick(edges[n], edges[n + 1])}
        ><i style=${{ height: `${count ? Math.max(4, (100 * count) / most) : 0}%` }}></i></button>`,
      )}
    </div>
    <div class="ends dim"><span>${short(edges[0])}</span><span>${short(edges[edges.length - 1])}</span></div>
  </div>`;
}
