// Numbers and tokens as text for a reader.

export function percent(p) {
  if (p > 0.9995) return "100 %";
  if (p >= 0.995) return `${(Math.floor(1000 * p) / 10).toFixed(1)} %`;
  if (p >= 0.1) return `${(100 * p).toFixed(0)} %`;
  if (p >= 0.001) return `${(100 * p).toFixed(1)} %`;
  return "<0.1 %";
}

export function bits(nats) {
  return `${(nats / Math.LN2).toFixed(2)} bits`;
}

// A token with its white space and control characters visible.
export function visible(token) {
  const shown = token.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  return shown.replace(/\p{Cc}/gu, (c) => `\\x${c.charCodeAt(0).toString(16).padStart(2, "0")}`) || "(empty)";
}

export function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

const decoder = new TextDecoder();

export function decodeBytes(bytes) {
  return decoder.decode(Uint8Array.from(bytes));
}

// Number of bytes at the end that begin a character which is not complete.
export function incomplete(bytes) {
  for (let back = 1; back <= Math.min(3, bytes.length); back++) {
    const byte = bytes[bytes.length - back];
    if ((byte & 0xc0) === 0x80) continue;
    const length = byte >= 0xf0 && byte < 0xf8 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc2 ? 2 : 1;
    return byte < 0xf8 && length > back ? back : 0;
  }
  return 0;
}
