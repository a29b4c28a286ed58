// Requests to the server, and data that is refreshed while the page is visible.

import { useEffect, useRef, useState } from "/vendor/preact.js";

const TOKEN = "etude-token";

// The token comes in the fragment (#) of the link that `etude dash` prints, which no server sees.
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem(TOKEN, given);
  history.replaceState(null, "", location.pathname + location.search);
}

export const hasToken = () => Boolean(sessionStorage.getItem(TOKEN));

export function setToken(token) {
  sessionStorage.setItem(TOKEN, token);
  location.reload();
}

function headers() {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function request(path, options = {}) {
  const response = await fetch(path, {
    cache: "no-cache",
    credentials: "omit",
    ...options,
    headers: { ...headers(), ...(options.headers || {}) },
  });
  if (!response.ok) {
    const told = await response.json().catch(() => ({}));
    const error = new Error(told.error || `the server answered ${response.status}`);
    error.status = response.status;
    throw error;
  }
  return response;
}

export const runPath = (run, rest) => `/api/runs/${encodeURIComponent(run)}/${rest}`;

export async function post(path, value) {
  return request(path, {
    method: "POST",
    body: JSON.stringify(value),
    headers: { "Content-Type": "application/json" },
  });
}

// A download link cannot carry the token, so the file is fetched and passed to the browser.
export async function download(path, name) {
  const response = await request(path);
  const url = URL.createObjectURL(await response.blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  URL.revokeObjectURL(url);
}

const EVERY_MS = 1000;

// {data, error}: the server's answer for each path, polled while the page is visible.
export function useAll(paths, every = EVERY_MS) {
  const [state, setState] = useState({ key: "", data: [], error: null });
  const tags = useRef({});
  const key = paths.join("\n");

  useEffect(() => {
    let live = true;
    let timer = 0;
    tags.current = {};
    async function read() {
      if (!document.hidden) {
        try {
          const answers = await Promise.all(paths.map((path) => request(path)));
          const now = answers.map((answer) => answer.headers.get("etag"));
          const same = now.every((tag, n) => tag && tag === tags.current[n]);
          if (!same) {
            const data = await Promise.all(answers.map((answer) => answer.json()));
            if (!live) return;
            tags.current = now;
            setState({ key, data, error: null });
          }
        } catch (error) {
          if (!live) return;
          tags.current = {};
          setState((old) => ({ key, data: old.key === key ? old.data : [], error }));
        }
      }
      if (live && every) timer = setTimeout(read, every);
    }
    read();
    return () => {
      live = false;
      clearTimeout(timer);
    };
  }, [key, every]);

  const fresh = state.key === key;
  return { data: fresh ? state.data : [], error: fresh ? state.error : null };
}

export function useData(path, every = EVERY_MS) {
  const { data, error } = useAll([path], every);
  return { data: data[0], error };
}
