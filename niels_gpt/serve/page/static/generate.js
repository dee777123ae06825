// One reply from the server, token by token.

import { stream } from "./api.js";
import { decodeBytes } from "./format.js";

export function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

export function textOf(tokens) {
  return decodeBytes(tokens.flatMap((token) => token.bytes));
}

// prompt: {model, messages} or {model, text}. settings: those of controls.js, with a seed.
// start: tokens with which the reply begins. onTokens(tokens) gets the new ones.
// Returns {tokens, finished, seconds, usage}; after an abort, `finished` is "aborted". If the server fails after the
// first token, `finished` is "failed" and `error` is the Error; before it, the Error is thrown.
export async function generate(prompt, settings, start, onTokens, signal) {
  const tokens = [...start];
  const began = performance.now();
  const result = { tokens, finished: "aborted", seconds: 0, usage: null };
  const body = { ...prompt, ...settings, reply: start.map((token) => token.id), top_logprobs: 6 };
  try {
    await stream(
      "/api/reply",
      body,
      (event) => {
        if (event.tokens) {
          tokens.push(...event.tokens);
          onTokens(event.tokens);
        }
        if (event.finished) {
          result.finished = event.finished;
          cut(tokens, event.bytes);
        }
        if (event.usage) result.usage = event.usage;
      },
      signal,
    );
  } catch (err) {
    if (!signal.aborted) {
      if (tokens.length === start.length) throw err;
      Object.assign(result, { finished: "failed", error: err });
    }
  } finally {
    result.seconds = (performance.now() - began) / 1000;
  }
  return result;
}

// Drop the tokens after so many bytes: they are part of a stop sequence that began in given tokens.
function cut(tokens, bytes) {
  let size = tokens.reduce((sum, token) => sum + token.bytes.length, 0);
  while (size > bytes) size -= tokens.pop().bytes.length;
}
