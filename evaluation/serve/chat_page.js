"use strict";
const byId = (id) => document.getElementById(id);
const facts = byId("facts").dataset, isChat = facts.chat === "1", bounds = facts.bounds.split(" ").map(Number);
const talk = byId("talk"), message = byId("message");
let history = [];       // messages of the conversation; for a base model, alternating prompts and continuations
let running = null;     // AbortController of the answer that is being generated
let forgets = false;    // true if the oldest turns are no longer sent, because they no longer fit in the context

document.body.classList.toggle("plain", !isChat);

function add(parent, name, className, text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;   // never innerHTML, because the text comes from the model
  parent.append(element);
  return element;
}

function addNote(text) {
  const line = add(talk, "p", "said note", text);
  line.setAttribute("role", "note");
  return line;
}

// Return the tokens in a chunk, each with its text, bytes, nats and alternatives. Both forms of the API are supported.
function tokensOf(choice) {
  const scores = choice.logprobs;
  if (!scores) return [];
  if (scores.content)
    return scores.content.map((token) => ({text: token.token, bytes: token.bytes, nats: -token.logprob,
      alternatives: token.top_logprobs.map((alternative) => [alternative.token, alternative.logprob])}));
  return scores.tokens.map((text, number) => ({text, bytes: null, nats: -scores.token_logprobs[number],
    alternatives: Object.entries(scores.top_logprobs[number]).sort((first, second) => second[1] - first[1])}));
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return (share >= 1 ? share.toFixed(1) : share >= 1e-3 ? share.toFixed(3) : share.toExponential(1)) + " %";
}

function describeTokens(tokens) {
  return tokens.map((token) => `${JSON.stringify(token.text)}  ${percent(-token.nats)}, ${token.nats.toFixed(2)} nats` +
    token.alternatives.map(([text, logprob]) => `\n${percent(logprob).padStart(9)}  ${JSON.stringify(text)}`).join("")).join("\n");
}

// Add a heat-map cell for each token. If the text was cut or a token is not a complete character, all tokens share one cell.
function show(parent, text, tokens) {
  const complete = tokens.map((token) => token.text).join("") === text && !tokens.some((token) => token.text.includes("\ufffd"));
  for (const group of complete ? tokens.map((token) => [token]) : [tokens]) {
    const cell = add(parent, "span", "", complete ? group[0].text : text);
    if (!group.length) continue;
    const nats = group.reduce((sum, token) => sum + token.nats, 0);
    cell.className = "p" + bounds.filter((bound) => nats >= bound).length;
    cell.dataset.t = describeTokens(group);
    cell.tabIndex = -1;
  }
}

function placeTooltip(event) {   // keep the tooltip of a token inside the page
  if (!event.target.dataset.t) return;
  const box = event.target.getBoundingClientRect(), inside = talk.getBoundingClientRect();
  event.target.classList.toggle("late", box.left > inside.left + inside.width / 2);
  event.target.classList.toggle("low", box.top > inside.top + inside.height / 2);
}
talk.addEventListener("pointerover", placeTooltip);
talk.addEventListener("focusin", placeTooltip);

function headers() {
  const key = sessionStorage.getItem("key");
  return {"Content-Type": "application/json", ...(key ? {Authorization: "Bearer " + key} : {})};
}

async function* events(response) {
  const decoder = new TextDecoder(), reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, {stream: true})).split("\n");
    rest = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function ask(body, signal) {
  const path = isChat ? "/v1/chat/completions" : "/v1/completions";
  const response = await fetch(path, {method: "POST", headers: headers(), body: JSON.stringify(body), signal});
  if (response.ok) return response;
  if (response.status === 401) { sessionStorage.removeItem("key"); byId("key").hidden = false; byId("key-text").focus(); }
  const problem = await response.json().catch(() => null);
  throw new Error(problem?.error?.message ?? `the server answered ${response.status}`);
}

function requestBody() {
  const common = {model: facts.model, stream: true, temperature: Number(byId("temperature").value),
    top_p: Number(byId("top-p").value), max_tokens: Number(byId("longest").value) || undefined, truncation: "auto"};
  if (!isChat) return {...common, earlier: history.slice(0, -1), prompt: history.at(-1), logprobs: 5};
  const system = byId("system").value.trim();
  const messages = [...(system ? [{role: "system", content: system}] : []), ...history];
  return {...common, messages, logprobs: true, top_logprobs: 5};
}

async function answer() {
  const turn = add(talk, "div", "said waiting"), text = add(turn, "div", "text"), startedAt = performance.now();
  const conversation = history;   // the list is replaced when the user begins a new chat
  if (!isChat) add(text, "span", "prompt", history.at(-1));
  let received = "", count = 0, finish = null, problem = null, first = startedAt;
  running = new AbortController();
  byId("stop").hidden = !(byId("send").hidden = true);
  try {
    for await (const chunk of events(await ask(requestBody(), running.signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0], part = choice.delta?.content ?? choice.text ?? "", tokens = tokensOf(choice);
      const follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
      if (!count) first = performance.now();
      if (chunk.left_out) forgetOldest(turn, conversation, chunk.left_out);
      if (part) show(text, part, tokens);
      [received, count, finish] = [received + part, count + tokens.length, choice.finish_reason];
      if (follows) talk.scrollTop = talk.scrollHeight;
    }
  } catch (error) {
    problem = error.name === "AbortError" ? null : error.message;
    finish = "stopped";
  }
  running = null;
  turn.classList.remove("waiting");
  byId("send").hidden = !(byId("stop").hidden = true);
  const seconds = (performance.now() - first) / 1000, speed = count > 1 ? `, ${((count - 1) / seconds).toFixed(0)} tokens/s` : "";
  const ends = {length: ", reached the length limit", stopped: ", stopped"}[finish] ?? "";
  if (count || !problem) add(turn, "p", "about", `${count} tokens${speed}${ends}`);
  if (problem) add(turn, "p", "error", problem).setAttribute("role", "alert");
  if (history !== conversation) return;
  if (received || finish !== "stopped") return history.push(isChat ? {role: "assistant", content: received} : received);
  const unanswered = history.pop();   // no text arrived, so the message returns to the input to be sent again
  message.value ||= isChat ? unanswered.content : unanswered;
  return resize();
}

// Drop the oldest turns, which the model no longer sees, from the conversation; they stay visible on the page. Show a
// note about this once, as `evaluate.py chat` does.
function forgetOldest(turn, conversation, count) {
  conversation.splice(0, count);
  if (!forgets && history === conversation) turn.before(addNote(facts.forgotten));
  forgets ||= history === conversation;
}

async function send(event) {
  event.preventDefault();
  const text = isChat ? message.value.trim() : message.value;
  if (running || (!text && (isChat || !history.length))) return;
  byId("empty").hidden = true;
  message.value = "";
  resize();
  if (isChat) add(add(talk, "div", "said user"), "p", "", text);
  history.push(isChat ? {role: "user", content: text} : text);
  talk.scrollTop = talk.scrollHeight;
  const answered = answer();
  talk.scrollTop = talk.scrollHeight;
  await answered;
  talk.scrollTop = talk.scrollHeight;
  message.focus();
}

function resize() {
  message.style.height = "";   // the height of one line
  message.style.height = Math.max(message.offsetHeight, message.scrollHeight + 2) + "px";
}

function forget() {
  running?.abort();
  history = [];
  forgets = false;
  for (const turn of talk.querySelectorAll(".said")) turn.remove();
  byId("empty").hidden = false;
  message.focus();
}

byId("composer").addEventListener("submit", send);
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", forget);
message.addEventListener("input", resize);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  if (event.key === "Escape") running?.abort();
});
byId("colors").addEventListener("change", (event) => talk.classList.toggle("heat", event.target.checked));
byId("options-button").addEventListener("click", (event) => {
  byId("options").hidden = !byId("options").hidden;
  event.target.setAttribute("aria-expanded", String(!byId("options").hidden));
});
for (const slider of document.querySelectorAll("[type=range]"))
  slider.addEventListener("input", () => { slider.previousElementSibling.value = slider.value; });
byId("options").addEventListener("submit", (event) => event.preventDefault());
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", byId("key-text").value);
  byId("key-text").value = "";
  byId("key").hidden = true;
  message.focus();
});
fetch("/v1/models", {headers: headers()}).then((response) => { byId("key").hidden = response.status !== 401; });
