// Requests to the gateway. The error of one that is refused has its `status`.

export async function ask(path, key, { headers = {}, ...options } = {}) {
  if (key) headers.authorization = `Bearer ${key}`;
  const reply = await fetch(path, { ...options, headers });
  if (!reply.ok) throw refused(reply.status, await reply.json());
  return reply;
}

// An answer as a stream of server-sent events: `for await (const chunk of answer(path, body, key, signal))`.
export async function* answer(path, body, key, signal) {
  const headers = { "content-type": "application/json" };
  const reply = await ask(path, key, { method: "POST", headers, body: JSON.stringify({ ...body, stream: true }), signal });
  for await (const event of events(reply.body)) {
    if (event === "[DONE]") return;
    const chunk = JSON.parse(event);
    if (chunk.error) throw refused(503, chunk);
    yield chunk;
  }
}

function refused(status, { error }) {
  return Object.assign(new Error(error.message), { status });
}

// The data of each event; comments and ids are passed over.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length) yield data.join("\n");
    }
  }
}
