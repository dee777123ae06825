// Requests to the server. Every error becomes an Error whose message is one line for the page.

const KEY = "niels-gpt-api-key";

export async function get(path) {
  return (await request(path, {})).json();
}

export async function post(path, body, signal) {
  return (await request(path, withBody(body, signal))).json();
}

// POST, then call onEvent with the JSON of every server-sent event until [DONE].
export async function stream(path, body, onEvent, signal) {
  const response = await request(path, withBody(body, signal));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let done = false;
  for (;;) {
    const { value, done: ended } = await reader.read().catch((err) => {
      if (err.name === "AbortError") throw err;
      return { done: true }; // the browser's "network error"
    });
    if (ended) break;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const data = text.slice(0, end).replace(/^data: /, "");
      text = text.slice(end + 2);
      if (data === "[DONE]") {
        done = true;
        continue;
      }
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      onEvent(event);
    }
  }
  if (!done) throw new Error("the connection to the server ended before the reply did");
}

function withBody(body, signal) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
}

async function request(path, options, asked = false) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (err) {
    if (err.name === "AbortError") throw err;
    throw new Error("the server does not answer: is it still running?");
  }
  if (response.status === 401) {
    if (await askKey(asked || key !== null)) return request(path, options, true);
    throw new Error("this server answers only with its API key: reload the page to enter it");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

// The error of a response; its code is that of OpenAI's shape.
async function failure(response) {
  try {
    const { message, code } = (await response.json()).error;
    return Object.assign(new Error(message), { code });
  } catch {
    return new Error(`the server answered ${response.status} ${response.statusText}`);
  }
}

let asking = null;

// Ask once, also if several requests get 401 at the same time. Resolves to whether there is a key now.
function askKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key");
    const input = document.getElementById("key-value");
    input.value = "";
    input.placeholder = wrong ? "that key was wrong" : "";
    dialog.addEventListener(
      "close",
      () => {
        asking = null;
        const given = dialog.returnValue === "ok" && input.value.trim();
        if (given) sessionStorage.setItem(KEY, given);
        input.value = "";
        resolve(Boolean(given));
      },
      { once: true },
    );
    dialog.returnValue = "";
    dialog.showModal();
  });
  return asking;
}

let models = null;

// The loaded models, as GET /v1/models lists them; requested once.
export function listModels() {
  models ??= get("/v1/models").then((found) => found.data);
  models.catch(() => (models = null));
  return models;
}
