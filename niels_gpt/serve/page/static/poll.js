// Ask the server again and again: every 2 s while something changes, less often otherwise, never in a hidden tab.

import { notify } from "./notice.js";

const SHORTEST = 2000;
const LONGEST = 30000;

// `ask` is async and returns whether to ask soon again. Returns a function that stops the polling.
export function poll(ask) {
  let delay = SHORTEST;
  let timer = null;
  let running = false;
  let stopped = false;
  let failed = false;

  async function turn() {
    timer = null;
    if (running || stopped || document.hidden) return;
    running = true;
    try {
      const soon = await ask();
      delay = soon ? SHORTEST : Math.min(delay * 2, LONGEST);
      if (failed && !stopped) notify("");
      failed = false;
    } catch (err) {
      delay = Math.min(delay * 2, LONGEST);
      if (!stopped) notify(err.message);
      failed = true;
    }
    running = false;
    if (!stopped && !document.hidden) timer = setTimeout(turn, delay);
  }

  function onVisibility() {
    clearTimeout(timer);
    delay = SHORTEST;
    if (!document.hidden) turn();
  }

  document.addEventListener("visibilitychange", onVisibility);
  turn();
  return () => {
    stopped = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", onVisibility);
  };
}
