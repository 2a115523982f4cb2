"use strict";
const at = (id) => document.getElementById(id);
const facts = at("facts").dataset, isChat = facts.chat === "1", bounds = facts.bounds.split(" ").map(Number);
const talk = at("talk"), message = at("message");
let history = [];       // messages of the conversation; of a base model the one text so far
let running = null;     // AbortController of the answer that comes
let forgets = false;    // the oldest turns did not fit the context any more, and are no longer sent

document.body.classList.toggle("plain", !isChat);

function add(parent, name, className, text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;   // never HTML: the text is the model's
  parent.append(element);
  return element;
}

function noted(text) {
  const line = add(talk, "p", "said note", text);
  line.setAttribute("role", "note");
  return line;
}

// A chunk's tokens in one form: bytes, probability, alternatives.
function tokensOf(choice) {
  const scores = choice.logprobs;
  if (!scores) return [];
  if (scores.content)
    return scores.content.map((one) => ({text: one.token, bytes: one.bytes, nats: -one.logprob,
      others: one.top_logprobs.map((other) => [other.token, other.logprob])}));
  return scores.tokens.map((text, number) => ({text, bytes: null, nats: -scores.token_logprobs[number],
    others: Object.entries(scores.top_logprobs[number]).sort((one, other) => other[1] - one[1])}));
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return (share >= 1 ? share.toFixed(1) : share >= 1e-3 ? share.toFixed(3) : share.toExponential(1)) + " %";
}

function about(tokens) {
  return tokens.map((one) => `${JSON.stringify(one.text)}  ${percent(-one.nats)}, ${one.nats.toFixed(2)} nats` +
    one.others.map(([text, logprob]) => `\n${percent(logprob).padStart(9)}  ${JSON.stringify(text)}`).join("")).join("\n");
}

// A cell of the heat map for each token; tokens that are no whole characters, or were cut, share one.
function show(parent, text, tokens) {
  const whole = tokens.map((one) => one.text).join("") === text && !tokens.some((one) => one.text.includes("\ufffd"));
  for (const group of whole ? tokens.map((one) => [one]) : [tokens]) {
    const cell = add(parent, "span", "", whole ? group[0].text : text);
    if (!group.length) continue;
    const nats = group.reduce((sum, one) => sum + one.nats, 0);
    cell.className = "p" + bounds.filter((bound) => nats >= bound).length;
    cell.dataset.t = about(group);
    cell.tabIndex = -1;
  }
}

function place(event) {   // the words under the pointer stay inside the page
  if (!event.target.dataset.t) return;
  const box = event.target.getBoundingClientRect(), inside = talk.getBoundingClientRect();
  event.target.classList.toggle("late", box.left > inside.left + inside.width / 2);
  event.target.classList.toggle("low", box.top > inside.top + inside.height / 2);
}
talk.addEventListener("pointerover", place);
talk.addEventListener("focusin", place);

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
  if (response.status === 401) { sessionStorage.removeItem("key"); at("key").hidden = false; at("key-text").focus(); }
  const problem = await response.json().catch(() => null);
  throw new Error(problem?.error?.message ?? `the server answered ${response.status}`);
}

function wanted() {
  const common = {model: facts.model, stream: true, temperature: Number(at("temperature").value),
    top_p: Number(at("top-p").value), max_tokens: Number(at("longest").value) || undefined, truncation: "auto"};
  if (!isChat) return {...common, earlier: history.slice(0, -1), prompt: history.at(-1), logprobs: 5};
  const system = at("system").value.trim();
  const messages = [...(system ? [{role: "system", content: system}] : []), ...history];
  return {...common, messages, logprobs: true, top_logprobs: 5};
}

async function answer() {
  const said = add(talk, "div", "said waiting"), text = add(said, "div", "text"), begun = performance.now();
  const asking = history;   // another list once the conversation is forgotten
  if (!isChat) add(text, "span", "prompt", history.at(-1));
  let got = "", count = 0, finish = null, problem = null, first = begun;
  running = new AbortController();
  at("stop").hidden = !(at("send").hidden = true);
  try {
    for await (const chunk of events(await ask(wanted(), running.signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0], part = choice.delta?.content ?? choice.text ?? "", tokens = tokensOf(choice);
      const follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
      if (!count) first = performance.now();
      if (chunk.left_out) forget_oldest(said, asking, chunk.left_out);
      if (part) show(text, part, tokens);
      [got, count, finish] = [got + part, count + tokens.length, choice.finish_reason];
      if (follows) talk.scrollTop = talk.scrollHeight;
    }
  } catch (error) {
    problem = error.name === "AbortError" ? null : error.message;
    finish = "stopped";
  }
  running = null;
  said.classList.remove("waiting");
  at("send").hidden = !(at("stop").hidden = true);
  const seconds = (performance.now() - first) / 1000, speed = count > 1 ? `, ${((count - 1) / seconds).toFixed(0)} tokens/s` : "";
  const ends = {length: ", ended at its longest", stopped: ", stopped"}[finish] ?? "";
  if (count || !problem) add(said, "p", "about", `${count} tokens${speed}${ends}`);
  if (problem) add(said, "p", "error", problem).setAttribute("role", "alert");
  if (history !== asking) return;
  if (got || finish !== "stopped") return history.push(isChat ? {role: "assistant", content: got} : got);
  const asked = history.pop();   // nothing came: it may be sent again
  message.value ||= isChat ? asked.content : asked;
  return resize();
}

// The model no longer sees the oldest turns, as in `evaluate.py chat`: they stay on the page.
function forget_oldest(said, asking, count) {
  asking.splice(0, count);
  if (!forgets && history === asking) said.before(noted(facts.forgotten));
  forgets ||= history === asking;
}

async function send(event) {
  event.preventDefault();
  const text = isChat ? message.value.trim() : message.value;
  if (running || (!text && (isChat || !history.length))) return;
  at("empty").hidden = true;
  message.value = "";
  resize();
  if (isChat) add(add(talk, "div", "said user"), "p", "", text);
  history.push(isChat ? {role: "user", content: text} : text);
  talk.scrollTop = talk.scrollHeight;
  const asking = answer();
  talk.scrollTop = talk.scrollHeight;
  await asking;
  talk.scrollTop = talk.scrollHeight;
  message.focus();
}

function resize() {
  message.style.height = "";   // of one line
  message.style.height = Math.max(message.offsetHeight, message.scrollHeight + 2) + "px";
}

function forget() {
  running?.abort();
  history = [];
  forgets = false;
  for (const said of talk.querySelectorAll(".said")) said.remove();
  at("empty").hidden = false;
  message.focus();
}

at("composer").addEventListener("submit", send);
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", forget);
message.addEventListener("input", resize);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  if (event.key === "Escape") running?.abort();
});
at("colours").addEventListener("change", (event) => talk.classList.toggle("heat", event.target.checked));
at("options-button").addEventListener("click", (event) => {
  at("options").hidden = !at("options").hidden;
  event.target.setAttribute("aria-expanded", String(!at("options").hidden));
});
for (const slider of document.querySelectorAll("[type=range]"))
  slider.addEventListener("input", () => { slider.previousElementSibling.value = slider.value; });
at("options").addEventListener("submit", (event) => event.preventDefault());
at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", at("key-text").value);
  at("key-text").value = "";
  at("key").hidden = true;
  message.focus();
});
fetch("/v1/models", {headers: headers()}).then((response) => { at("key").hidden = response.status !== 401; });
