// The page: a chat message or a text to continue in; text, trees and figures out.

import { answer, ask } from "./stream.js";
import { drawRound, visible } from "./tree.js";

const $ = (id) => document.getElementById(id);
const element = (name, className, text) => Object.assign(document.createElement(name), { className, textContent: text });
const NAMES = { required: "speculation in every round", auto: "speculation where it pays", disabled: "plain decoding" };

const PATHS = { chat: "v1/chat/completions", text: "v1/completions" };
const EXAMPLES = { chat: "Name three colours of the rainbow.", text: 'def mean(values):\n    """Return the arithmetic mean."""\n' };

let messages = []; // of the conversation, up to the last answer
let rounds = []; // of the run that is shown: {nodes, path, tokens}
let shown = 0;
let following = true; // the newest round, until somebody looks at an older one
let served = ""; // name of the model; the first, where there are several
let running = null; // AbortController

class Run {
  constructor(mode) {
    this.mode = mode;
    this.text = ""; // of a chat message
    this.tokens = this.rounds = 0;
    this.depths = []; // [d] = rounds that accepted exactly d tokens
    this.first = this.last = 0;
    this.firstTokens = 0;
  }

  add(round, now) {
    if (!this.rounds) { this.first = now; this.firstTokens = round.tokens.length; }
    this.last = now;
    this.rounds += 1;
    this.tokens += round.tokens.length;
    if (round.nodes.length) this.depths[round.path.length] = (this.depths[round.path.length] || 0) + 1;
  }

  // Between the first run of tokens and the last one: the prompt's time does not count.
  get rate() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 ? (this.tokens - this.firstTokens) / seconds : 0;
  }
}

// `promptFields`: messages or prompt of the request; `block`: element that the text is written to.
async function generate(run, kind, promptFields, block) {
  const seed = $("seed").value;
  const body = {
    model: served,
    ...promptFields,
    temperature: Number($("temperature").value),
    max_tokens: Number($("tokens").value),
    return_trees: true,
    speculation: { mode: run.mode },
    ...(seed ? { seed: Number(seed) } : {}),
  };
  rounds = [];
  following = true;
  block.replaceChildren();
  $("tree").replaceChildren();
  for await (const chunk of answer(PATHS[kind], body, $("key").value, running.signal)) {
    const choice = chunk.choices[0];
    if (!choice) continue;
    run.text += choice.delta?.content || "";
    for (const round of choice.rounds || []) {
      rounds.push(round);
      run.add(round, performance.now());
      appendTokens(round, block);
    }
    figures();
    if (following) show(rounds.length - 1);
  }
}

let runs = [];

async function work(modes) {
  if (!$("ask").reportValidity()) return;
  running?.abort();
  const mine = (running = new AbortController());
  const kind = $("kind").value;
  const prompt = $("prompt").value;
  const conversation = [...messages, { role: "user", content: prompt }];
  if (kind === "text" || !messages.length) $("text").replaceChildren();
  const question = element("div", "question", kind === "chat" ? prompt : "");
  const block = element("div", "answer", "");
  $("text").append(question, block);
  $("error").hidden = true;
  $("stop").disabled = false;
  runs = [];
  try {
    for (const mode of modes) {
      const run = new Run(mode);
      runs.push(run);
      await generate(run, kind, kind === "chat" ? { messages: conversation } : { prompt }, block);
    }
  } catch (error) {
    if (!mine.signal.aborted) refuse(error);
    if (!block.textContent) { question.remove(); block.remove(); }
  } finally {
    if (running === mine) { // else another message was sent meanwhile, and what this one began to answer is forgotten
      running = null;
      $("stop").disabled = true;
      remember(conversation, runs[runs.length - 1].text);
      figures();
    }
  }
}

// The answer to a chat message; of one that was stopped, its beginning.
function remember(conversation, text) {
  if (!text) return;
  messages = [...conversation, { role: "assistant", content: text }];
  $("prompt").value = "";
  $("new-conversation").disabled = false;
}

function startConversation() {
  running?.abort();
  running = null;
  $("stop").disabled = true;
  messages = [];
  $("new-conversation").disabled = true;
  $("text").replaceChildren();
  if (["", ...Object.values(EXAMPLES)].includes($("prompt").value)) $("prompt").value = EXAMPLES[$("kind").value];
}

function refuse(error) {
  $("error").textContent = error.message || String(error);
  $("error").hidden = false;
  if (error.status === 401 || error.status === 403) { $("key-field").hidden = false; $("key").focus(); }
}

// Tokens of a round at the end of the text: the last one is the target's own.
function appendTokens(round, block) {
  block.append(...round.tokens.map((token, i) => element("span", i < round.path.length ? "token accepted" : "token bonus", token)));
  $("text").scrollTop = $("text").scrollHeight;
}

function show(index) {
  if (!rounds.length) return;
  shown = Math.min(Math.max(index, 0), rounds.length - 1);
  const round = rounds[shown], before = rounds[shown - 1];
  $("which").max = rounds.length - 1;
  $("which").value = shown;
  $("round").textContent = `round ${shown + 1} of ${rounds.length}: ${round.path.length} of ${round.nodes.length} nodes accepted`;
  $("tree").setAttribute("aria-label", `${$("round").textContent}. Committed: ${round.tokens.map(visible).join(" ")}`);
  $("tree").replaceChildren(drawRound(round, before ? before.tokens[before.tokens.length - 1] : "prompt"));
}

function look(index) {
  show(index);
  following = shown === rounds.length - 1;
}

function figures() {
  $("figures").tBodies[0].replaceChildren(...runs.filter((run) => run.rounds).map((run) => {
    const row = document.createElement("tr");
    const plain = runs.find((other) => other.mode === "disabled" && other !== run);
    const gain = plain && plain.rate && run.rate ? ` (${(run.rate / plain.rate).toFixed(2)} ×)` : "";
    const cells = [NAMES[run.mode], run.tokens, run.rounds, (run.tokens / run.rounds).toFixed(2), run.rate.toFixed(1) + gain];
    row.append(...cells.map((text) => element("td", "", text)));
    return row;
  }));
  depths(runs[runs.length - 1]);
}

function depths(run) {
  const counts = run ? run.depths : [];
  const total = counts.reduce((sum, n) => sum + (n || 0), 0);
  const cells = [];
  let left = total;
  for (let depth = 1; depth < counts.length; depth++) {
    left -= counts[depth - 1] || 0;
    const bar = element("div", "bar", ""), share = (100 * left) / total;
    bar.style.width = `${share}%`;
    cells.push(element("span", "", depth), bar, element("span", "", `${Math.round(share)} %`));
  }
  $("depths").replaceChildren(...cells);
}

async function describe() {
  const reply = await ask("v1/models", $("key").value);
  const model = (await reply.json()).data[0];
  served = model.id;
  $("model").textContent = `${model.id}, ${model.max_model_len} positions`;
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); work([$("speculation").value]); });
$("compare").addEventListener("click", () => work(["disabled", $("speculation").value === "disabled" ? "required" : $("speculation").value]));
$("stop").addEventListener("click", () => running?.abort());
$("new-conversation").addEventListener("click", startConversation);
$("kind").addEventListener("change", startConversation);
$("earlier").addEventListener("click", () => look(shown - 1));
$("later").addEventListener("click", () => look(shown + 1));
$("which").addEventListener("input", () => look(Number($("which").value)));
$("key").addEventListener("change", () => describe().catch(refuse));
$("tree").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step) { event.preventDefault(); look(shown + step); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); $("ask").requestSubmit(); }
});
startConversation();
describe().catch(refuse);
