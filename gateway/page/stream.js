// An answer as a stream of server-sent events: `for await (const chunk of answer(path, body, key, signal))`.

export class Refused extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.param = error.param;
  }
}

export async function* answer(path, body, key, signal) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const reply = await fetch(path, { method: "POST", headers, body: JSON.stringify({ ...body, stream: true }), signal });
  if (!reply.ok) throw new Refused(reply.status, (await reply.json()).error);
  for await (const event of events(reply.body)) {
    if (event === "[DONE]") return;
    const chunk = JSON.parse(event);
    if (chunk.error) throw new Refused(503, chunk.error);
    yield chunk;
  }
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
