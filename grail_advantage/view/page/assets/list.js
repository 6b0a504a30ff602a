// The list of rollouts.

// What a response is known by in a line.
const rewardText = (row) => (row.reward === null ? "no reward" : `reward ${number(row.reward)}`);
const headline = (row, most) => (TALKS ? rewardText(row) : row.answer === null ? "no answer" : row.answer.slice(0, most));
const sizeOf = (row) => (TALKS ? plural(row.turns.length, "turn") : plural(row.length, "token"));
let shown = [];
const list = $("list");

// Rollouts with the words that are sought in their prompt or response; null without any.
let found = null;
let searches = 0;
const texts = new Map();
// Whether it came to its end: a later search stops it.
async function search() {
  const mine = ++searches;
  const words = state.find.trim().toLowerCase();
  const among = new Set();
  if (words) $("count").textContent = "Searching…";
  for (const row of words ? rows : []) {
    const has = problemOf(row).prompt.toLowerCase().includes(words);
    if (!has && !texts.has(row.i)) texts.set(row.i, await textOf(row.i));
    if (mine !== searches) return false;
    if (has || texts.get(row.i).includes(words)) among.add(row.i);
  }
  found = words ? among : null;
  return true;
}

function choose() {
  shown = rows.filter(
    (row) =>
      (!found || found.has(row.i)) &&
      (state.run === "" || row.run === Number(state.run)) &&
      (state.step === "" || row.step === Number(state.step)) &&
      (state.outcome === "" || row.outcome === state.outcome) &&
      (state.answer === "" || (row.answer !== null || row.span !== null) === (state.answer === "yes")) &&
      (!TALKS || turnsChosen(row)),
  );
  if (state.sort === "spread") shown.sort((a, b) => (b.spread ?? -1) - (a.spread ?? -1));
  if (state.sort === "length") shown.sort((a, b) => b.length - a.length);
  if (state.sort === "shortest") shown.sort((a, b) => a.length - b.length);
  if (TALKS) sortByTurns();
  list.replaceChildren(...shown.map((row) => items[row.i]));
  const all = shown.length === rows.length;
  $("count").textContent = shown.length
    ? all ? plural(rows.length, "rollout") : `${number(shown.length)} of ${plural(rows.length, "rollout")}`
    : "No rollout is like this; change the choice below";
  drawList();
}

const widest = Math.max(1e-9, ...rows.map((row) => row.spread ?? 0));
const items = rows.map((row) => {
  const element = make("div", "item", "", { role: "option", tabindex: -1 });
  const problem = problemOf(row);
  const text = make("span", "text");
  visible(text, problem.line || problem.id?.slice(0, 40) || `problem ${groups[row.group].place + 1}`, false);
  // A response without scores has no spread to show.
  const why = row.truncated ? "truncated" : row.no_scores ? "no scores" : "";
  const spread = make("span", why ? "side" : "spread", why, { title: row.no_scores ?? why });
  if (!why) {
    const filled = make("i");
    filled.style.width = `${((row.spread ?? 0) / widest) * 100}%`;
    spread.append(filled);
    spread.title = `${spreadOf(row)} ${number(row.spread)}`;
  }
  const parts = [allSteps.length > 1 && `step ${row.step}`, (TALKS || row.answer === null ? "" : "answer ") + headline(row, 200), TALKS && failedCalls(row), sizeOf(row), index.runs.length > 1 && index.runs[row.run].name];
  const under = make("span", "under");
  visible(under, parts.filter(Boolean).join(" · "), false);
  element.append(glyph(row.outcome), text, under, spread);
  element.addEventListener("click", () => {
    open(row.i);
    element.focus({ preventScroll: true });
    if (narrow.matches) $("reader").scrollIntoView();
  });
  element.addEventListener("keydown", (event) => keyed(event, row));
  return element;
});

// Marks the entry of the open rollout, which Tab leads to; else Tab leads to the first.
function drawList() {
  for (const old of list.querySelectorAll('[tabindex="0"]')) old.tabIndex = -1;
  for (const old of list.querySelectorAll('[aria-selected="true"]')) old.setAttribute("aria-selected", false);
  const current = shown.find((row) => row.i === state.row);
  if (current) items[current.i].setAttribute("aria-selected", true);
  if (shown.length) items[(current ?? shown[0]).i].tabIndex = 0;
}

function reveal(row) {
  const { offsetTop: top, offsetHeight: height } = items[row.i];
  list.scrollTop = clamp(list.scrollTop, top + height - list.clientHeight, top);
}
function keyed(event, row) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const page = Math.max(1, Math.floor(list.clientHeight / items[row.i].offsetHeight) - 1);
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
  if (event.key in moves) {
    event.preventDefault();
    const next = shown[clamp(shown.indexOf(row) + moves[event.key], 0, shown.length - 1)];
    open(next.i);
    reveal(next);
    items[next.i].focus({ preventScroll: true });
  } else if (event.key === "Enter" || event.key === "ArrowRight") {
    event.preventDefault();
    (document.querySelector(".tokens [tabindex='0']") ?? $("pages")).focus();
  }
}
