// Code and diffs in colours. Every piece is a text node: text is never turned into markup.

import { html, useState } from "/vendor/preact.js";

const WORDS = new Set(
  ("and as assert async await break case catch class const continue def del do elif else enum except export extends false finally fn for from func function global if impl import in interface is lambda let match mut new nil None not null or pass pub raise return self static struct super switch this throw true True False try type undefined use var while with yield").split(" "),
);
const TOKEN = /("""[\s\S]*?"""|'''[\s\S]*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)|((?:#|\/\/)[^\n]*)|(\b\d[\w.]*\b)|([A-Za-z_]\w*)/g;
const MOST = 60000;

export function Code({ text }) {
  if (text.length > MOST) return html`<code>${text}</code>`;
  const pieces = [];
  let end = 0;
  for (const found of text.matchAll(TOKEN)) {
    const kind = found[1] ? "str" : found[2] ? "com" : found[3] ? "nbr" : WORDS.has(found[4]) ? "kw" : "";
    if (!kind) continue;
    pieces.push(text.slice(end, found.index), html`<span class=${kind}>${found[0]}</span>`);
    end = found.index + found[0].length;
  }
  return html`<code>${pieces}${text.slice(end)}</code>`;
}

export const isDiff = (text) => /^(diff --git |--- .*\n\+\+\+ |@@ )/m.test(text);

const looksLikeCode = (text) =>
  /^\s*(\d+\s+)?(def|class|import|from|function|const|let|return|if|for|while|#include|package|fn)\b/m.test(text);

const lineKind = (line) =>
  line.startsWith("@@") ? "hunk" : /^(diff |index |--- |\+\+\+ )/.test(line) ? "file" : line[0] === "+" ? "add" : line[0] === "-" ? "cut" : "";

export function Diff({ text }) {
  const lines = text.replace(/\n$/, "").split("\n");
  return html`<pre class="diff">${lines.map((line, n) => {
    const kind = lineKind(line);
    const plain = kind === "hunk" || kind === "file";
    return html`<span class=${`line ${kind}`} key=${n}>${plain ? line : html`${line.slice(0, 1) || " "}<${Code} text=${line.slice(1)} />`}${"\n"}</span>`;
  })}</pre>`;
}

const FOLD_LINES = 14;
const FOLD_CHARS = 2400;
const FOLD_LINE = 400;
const foldLine = (line) => (line.length > FOLD_LINE ? `${line.slice(0, FOLD_LINE)} …` : line);

// Verbatim text; of a long one only the first lines, until all of it is requested.
export function Text({ text, lines = FOLD_LINES }) {
  const [open, setOpen] = useState(false);
  const all = text.split("\n");
  const long = all.length > lines + 4 || text.length > FOLD_CHARS || all.some((line) => line.length > FOLD_LINE);
  const shown = open || !long ? text : all.slice(0, all.length > lines + 4 ? lines : all.length).map(foldLine).join("\n").slice(0, FOLD_CHARS);
  return html`${isDiff(shown) ? html`<${Diff} text=${shown} />` : html`<pre>${looksLikeCode(shown) ? html`<${Code} text=${shown} />` : shown}</pre>`}
    ${long && html`<button type="button" class="more" onClick=${() => setOpen(!open)}>${open ? "show less" : `show all: ${all.length.toLocaleString()} lines, ${text.length.toLocaleString()} characters`}</button>`}`;
}

// The changes of a session's calls, line by line. Null if its tools do not show them: this needs a
// `read` that numbers its lines, and edits of numbered lines.
export function changes(turns) {
  const numbered = /^(\d+) ?(.*)$/;
  let first = null;
  let now = null;
  for (const turn of turns) {
    if (turn.role === "tool" && turn.text) {
      const lines = turn.text.split("\n").map((line) => line.match(numbered));
      if (lines.every((found, n) => found && Number(found[1]) === n + 1)) {
        first = first ?? lines.map((found) => found[2]);
        now = now ?? lines.map((found) => found[2]);
      }
    }
    for (const call of turn.calls) {
      const answer = turns.find((each) => each.role === "tool" && each.call_id && each.call_id === call.id);
      if (answer && /^error/i.test(answer.text)) continue;
      const at = Number(call.arguments.line);
      if (now && call.arguments.text !== undefined && at >= 1 && at <= now.length) {
        const indent = now[at - 1].match(/^\s*/)[0];
        now[at - 1] = /^\s/.test(call.arguments.text) ? call.arguments.text : indent + call.arguments.text;
      }
    }
  }
  if (!first || first.every((line, n) => line === now[n])) return null;
  return first
    .map((line, n) => (line === now[n] ? ` ${line}` : `-${line}\n+${now[n]}`))
    .join("\n");
}

const OLD = ["old_string", "old_str", "old", "search"];
const NEW = ["new_string", "new_str", "new", "replace"];

// An edit that names the text before and after, as a diff.
export function editDiff(given) {
  const old = OLD.find((key) => typeof given[key] === "string");
  const fresh = NEW.find((key) => typeof given[key] === "string");
  if (!old || !fresh) return null;
  const mark = (sign, text) => text.split("\n").map((line) => sign + line).join("\n");
  return `@@ ${given.path ?? given.file_path ?? given.file ?? ""} @@\n${mark("-", given[old])}\n${mark("+", given[fresh])}`;
}
