// What the page shows: rollouts by group, and the choices, which the address keeps.

const METHODS = index.methods;
const SIGNS = { right: "✓", wrong: "✕" };
const outcomeWord = (outcome) => index.outcomes[outcome ?? ""];
function glyph(outcome) {
  const element = make("span", `glyph ${outcome ?? ""}`);
  element.append(make("span", "", SIGNS[outcome] ?? "·", { "aria-hidden": true }), make("span", "unseen", outcomeWord(outcome)));
  return element;
}
const rows = index.rows.step.map((_, i) => {
  const row = { i };
  for (const name of Object.keys(index.rows)) row[name] = index.rows[name][i];
  row.name = `${row.run ? "b." : ""}${row.step}${row.update ? "u" + row.update : ""}.${row.row}`;
  return row;
});
const byName = new Map(rows.map((row) => [row.name, row]));
const groups = index.groups;
for (const group of groups) group.rows = [];
for (const row of rows) groups[row.group].rows.push(row);
// Correct ones first, then incorrect ones, then those that were not scored.
const RANK = { right: 0, wrong: 1 };
for (const group of groups) group.rows.sort((a, b) => (RANK[a.outcome] ?? 2) - (RANK[b.outcome] ?? 2) || a.row - b.row);
// Whether there are conversations, and whether a method gives the advantages themselves.
const TALKS = rows.length > 0 && rows[0].turns !== undefined;
const gives = (row, method = state.method) => index.runs[row.run].given.includes(method);
const spreadOf = (row) => `spread of ${gives(row, METHODS[0]) ? "advantages" : "weights"}`;
const DEVIATION = "the standard deviation over a response's tokens that train";
const DASHES = index.runs.length > 1 ? ` · solid: ${index.runs[0].name}, dashed: ${index.runs[1].name}` : "";
const steps = [...new Set(rows.filter((row) => !row.run).map((row) => row.step))].sort((a, b) => a - b);
const problemOf = (row) => index.problems[groups[row.group].problem];
const allSteps = [...new Set(rows.map((row) => row.step))].sort((a, b) => a - b);
const epochs = rows.reduce((most, row) => Math.max(most, row.updates ?? 0), 0);
const narrow = matchMedia("(max-width: 760px)");
const touch = matchMedia("(hover: none)");
const dark = matchMedia("(prefers-color-scheme: dark)");

const DEFAULTS = { run: "", step: "", outcome: "", answer: "", find: "", turns: "", from: "", to: "", sort: "", overlay: index.overlays[0], method: METHODS[0] ?? "", view: "one", epoch: "" };
const state = { ...DEFAULTS, row: -1, token: -1 };
function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  Object.assign(state, DEFAULTS);
  for (const name of Object.keys(DEFAULTS)) if (given.has(name)) state[name] = given.get(name);
  if (!index.overlays.includes(state.overlay)) state.overlay = DEFAULTS.overlay;
  if (!METHODS.includes(state.method)) state.method = DEFAULTS.method;
  if (state.view !== "side") state.view = "one";
  if (!(Number(state.epoch) >= 1 && Number(state.epoch) <= epochs)) state.epoch = "";
  state.token = given.has("token") ? Number(given.get("token")) : -1;
  const named = byName.get(given.get("rollout"));
  return named ? named.i : -1;
}
let written = "";
function writeHash() {
  const out = new URLSearchParams();
  for (const name of Object.keys(DEFAULTS)) if (state[name] !== DEFAULTS[name]) out.set(name, state[name]);
  if (state.row >= 0) out.set("rollout", rows[state.row].name);
  if (state.token >= 0) out.set("token", state.token);
  written = `#${out}`;
  if (location.hash !== written) history.replaceState(null, "", written);
}
