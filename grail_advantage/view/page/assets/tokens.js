// The tokens of an open response: their colours, the one that is pointed at, and its values.

const within = (t, start, end) => t >= start && t < end;
const ofTool = (row, t) => TALKS && !row.turns.some(([start, end]) => within(t, start, end));
const inWrongStep = (row, t) => row.wrong_step && within(t, ...row.wrong_step);
function paint(page) {
  const { row, data } = page;
  const shown = places(data, state.overlay);
  for (let t = 0; t < data.n; t++) {
    let name = `t ${className(state.overlay, shown[t])}`;
    if (!data.mask[t]) name += " off";
    if (ofTool(row, t)) name += " tool";
    if (row.span && within(t, row.span[0], row.span[3])) name += " span";
    if (inWrongStep(row, t)) name += " wrong-step";
    if (isClipped(data, t)) name += " clipped";
    if (t === page.pointed) name += " at";
    page.spans[t].className = name;
  }
}
// The token that keyboard and tap point at.
function point(page, t, focus) {
  for (const other of pages) {
    if (other.pointed === undefined) continue;
    other.spans[other.pointed].classList.remove("at");
    other.spans[other.pointed].setAttribute("aria-selected", "false");
    if (other === page) other.spans[other.pointed].tabIndex = -1;
    else other.pointed = undefined;
  }
  page.spans[0].tabIndex = -1;
  page.pointed = t;
  const span = page.spans[t];
  span.tabIndex = 0;
  span.classList.add("at");
  span.setAttribute("aria-selected", "true");
  span.setAttribute("aria-label", describe(page, t));
  if (focus) span.focus({ preventScroll: true });
  if (state.row !== page.row.i) {
    state.row = page.row.i;
    drawList();
    markStrips();
  }
  state.token = t;
  writeHash();
  readOut(page, t);
}

function move(page, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || page.pointed === undefined) return;
  const last = page.spans.length - 1;
  const to = { ArrowRight: Math.min(last, page.pointed + 1), ArrowLeft: Math.max(0, page.pointed - 1), Home: 0, End: last }[event.key];
  if (event.key === "Escape") list.querySelector('[tabindex="0"]')?.focus();
  if (to === undefined) return;
  event.preventDefault();
  point(page, to, true);
  page.spans[to].scrollIntoView({ block: "nearest", behavior: "instant" });
}

const FIELDS = [
  ["weight", "Weight"], ["score", "Score"], ["base_advantage", "Base advantage"], ["advantage", "Advantage"], ["received", "Received"], ["surprisal", "Surprisal"], ["entropy", "Entropy"],
];
// Of a response whose method gives advantages, weights say nothing, and of turns with their own neither does the one of GRPO.
const ownAdvantages = (row) => TALKS && gives(row);
const fieldsOf = ({ row, data }) =>
  FIELDS.filter(([name]) => column(data, name) && !(name === "weight" && gives(row)) && !(name === "base_advantage" && ownAdvantages(row)));
function notes(page, t) {
  const { row, data } = page;
  const lines = [];
  if (row.span && within(t, row.span[1], row.span[2])) lines.push("in the answer");
  else if (row.span && within(t, row.span[0], row.span[3])) lines.push("bounds the answer");
  else if (row.span && t >= row.span[3]) lines.push("after the answer");
  if (inWrongStep(row, t)) lines.push("in the incorrect step");
  if (ofTool(row, t)) lines.push("not the model's: a tool or a user wrote it");
  else if (!data.mask[t]) lines.push("does not train");
  const { clipped, received } = data.columns;
  const by = row.updates > 1 ? Array.from({ length: row.updates }, (_, k) => number(data.columns[`received@${k + 1}`]?.[t])) : [];
  if (by.length) lines.push(`received by epoch ${by.join(", ")}`);
  if (clipped?.[t] > 0) lines.push(row.updates > 1 ? `clipped in ${number(100 * clipped[t])} % of them` : "clipped");
  if (data.mask[t] && (row.updates === 0 || Number.isNaN(received?.[t]))) lines.push("not in the update");
  return lines;
}
const tokenText = (data, t) => data.words.texts[data.ids[t]] || "part of a character";
function describe(page, t) {
  const { data } = page;
  const values = fieldsOf(page).map(([name, text]) => `${text.toLowerCase()} ${number(column(data, name)[t])}`);
  return [spoken(tokenText(data, t)), `token ${t + 1} of ${data.n}`, ...values, ...notes(page, t)].join(", ");
}
function readOut(page, t) {
  const host = $("readout");
  const idle = !page?.data || t === undefined;
  host.hidden = idle && !pages.length;
  host.classList.toggle("idle", idle);
  if (idle) {
    host.replaceChildren(make("span", "quiet", touch.matches ? "Tap a token to read its values." : "Point at a token to read its values. Arrow keys move between tokens, Escape goes back to the list."));
    return;
  }
  const { data } = page;
  const what = make("div", "what");
  what.append(plain(tokenText(data, t)).slice(0, 60), make("small", "", `${number(t + 1)} of ${number(data.n)} · id ${data.words.ids[data.ids[t]]}`));
  const values = make("dl");
  for (const [name, text] of fieldsOf(page)) {
    const known = column(data, name);
    const field = make("div", name === state.overlay ? "on" : "");
    field.append(make("dt", "", text), make("dd", "", number(known[t])));
    if (name === "surprisal" && !Number.isNaN(known[t])) field.title = `probability ${number(Math.exp(-known[t]))}`;
    values.append(field);
  }
  const more = notes(page, t).join(" · ");
  host.replaceChildren(what, values);
  if (more) host.append(make("span", "more", more));
}
