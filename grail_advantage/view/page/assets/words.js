// Elements, numbers and text made visible.

const $ = (id) => document.getElementById(id);
function make(tag, name, text, attributes = {}) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
// An entry of a plot's key: its dash, and text or elements.
function keyEntry(name, colour, ...content) {
  const entry = make("span", name);
  const dash = make("i");
  if (colour) dash.style.borderColor = `var(--${colour})`;
  entry.append(dash, ...content);
  return entry;
}
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

const MINUS = "\u2212";
function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : MINUS + "∞";
  const size = Math.abs(value);
  let text;
  if (size === 0) text = "0";
  else if (size >= 1e6 || size < 1e-4) text = size.toExponential(digits - 1).replace("e+", "e").replace("e-", "e" + MINUS);
  else if (size >= 1000) text = Math.round(size).toLocaleString("en-US").replace(/,/g, "\u202f");
  else text = String(Number(size.toPrecision(digits)));
  return (value < 0 ? MINUS : "") + text;
}
const plural = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;

// Characters that show nothing or move others: control, format (bidi, zero width, tags), half a surrogate pair, odd blanks.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0]/u;
const UNSEEN_ALL = new RegExp(UNSEEN.source, "gu");
const code = (c) => "U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");

// Text with its unseen characters named, into an element.
function visible(element, text, breaks = true) {
  if (!UNSEEN.test(text)) {
    element.textContent = text;
    return;
  }
  let rest = 0;
  element.textContent = "";
  const flush = (end) => end > rest && element.append(text.slice(rest, end));
  for (const match of text.matchAll(UNSEEN_ALL)) {
    const c = match[0];
    if (!breaks && c === "\n") continue;
    flush(match.index);
    rest = match.index + c.length;
    if (c === "\n") element.append(make("span", "sign soft", "↵"), "\n");
    else if (c === "\t") element.append(make("span", "sign soft", "→"), "\t");
    else element.append(make("span", "sign", code(c)));
  }
  flush(text.length);
}
// A new element with such text.
function shownText(tag, text) {
  const element = make(tag);
  visible(element, text);
  return element;
}
const plain = (text) =>
  text.replace(UNSEEN_ALL, (c) => (c === "\n" ? "↵" : c === "\t" ? "⇥" : code(c))).replace(/^ | $/g, "␣");

// Text for a screen reader.
function spoken(text) {
  if (/\S/.test(text)) return plain(text);
  return text.includes("\n") ? "line break" : text.includes("\t") ? "tab" : text === "" ? "no text" : "space";
}
