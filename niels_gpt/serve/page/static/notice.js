// The line for errors above every view.

const line = document.getElementById("notice");

export function notify(text) {
  line.textContent = text;
}

// Run an async function of an event; its error becomes the line. Aborting is no error.
export function guarded(run) {
  return async (...values) => {
    notify("");
    try {
      return await run(...values);
    } catch (err) {
      if (err.name !== "AbortError") notify(err.message);
    }
  };
}
