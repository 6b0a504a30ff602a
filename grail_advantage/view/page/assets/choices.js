// The choices above the list and the text, and the first view.

const form = $("filters");
const bar = $("toolbar");
const FILTERS = ["run", "step", "outcome", "answer", "find", "sort", ...(TALKS ? ["turns", "from", "to"] : [])];
const SHOWN = ["overlay", "method", "view", "epoch"];
function setForms() {
  for (const name of FILTERS) {
    form.elements[name].value = state[name];
    if (form.elements[name].value !== state[name]) form.elements[name].value = state[name] = "";
  }
  for (const name of SHOWN) bar.elements[name].value = state[name];
  showEpochs();
}
function chooseStep(step) {
  state.step = step;
  form.elements.step.value = step;
  refilter();
}
// A choice that leaves out the open rollout opens the most telling one that is left.
function refilter() {
  choose();
  list.scrollTop = 0;
  if (shown.length && (state.row < 0 || !shown.includes(rows[state.row]))) open(telling(shown).i);
  const current = shown.find((row) => row.i === state.row);
  if (current) reveal(current);
  drawList();
  writeHash();
}
form.addEventListener("change", () => {
  for (const name of FILTERS) state[name] = form.elements[name].value;
  refilter();
});
form.elements.find.addEventListener("input", async ({ target }) => {
  state.find = target.value;
  if (await search()) refilter();
});
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((details) => (details.open = true)));
addEventListener("submit", (event) => event.preventDefault());

// Of problems with correct and incorrect responses, the one with the widest weights: the first thing to look at.
function telling(among) {
  const score = (row) => {
    const group = groups[row.group];
    const mixed = group.rows.some((row) => row.outcome === "right") && group.rows.some((row) => row.outcome === "wrong");
    return (mixed ? 1e6 : 0) + (row.no_scores ? 0 : 1e4) + (row.wrong_step ? 1e3 : 0) + (row.spread ?? 0);
  };
  if (state.sort !== "") return among[0];
  if (among.some((row) => !row.run)) among = among.filter((row) => !row.run);
  const step = among.reduce((last, row) => Math.max(last, row.step), 0);
  return among.filter((row) => row.step === step).reduce((best, row) => (score(row) > score(best) ? row : best));
}

function reshow() {
  const { method, view } = state;
  for (const name of SHOWN) state[name] = bar.elements[name].value;
  if (state.method !== method) {
    pages.forEach((page) => page.element.replaceChild(facts(page.row), page.element.firstChild));
  }
  if (state.view !== view) {
    state.token = -1;
    drawPages(++turn);
  } else repaint();
  writeHash();
}
bar.addEventListener("change", reshow);
function setMethod(method) {
  bar.elements.method.value = method;
  reshow();
}
function repaint() {
  showEpochs();
  for (const page of pages) if (page.data) paint(page), drawPageStrips(page);
  drawStrips();
  drawLegend();
  const at = pages.find((page) => page.pointed !== undefined);
  if (at) readOut(at, at.pointed);
}

function segments(name, options) {
  for (const [value, text] of options) {
    const label = make("label");
    // Of one choice alone, the form would not check it.
    const input = make("input", "", undefined, { type: "radio", name, value, checked: "" });
    label.append(input, make("span", "", text));
    $(name).append(label);
  }
}

function setUp() {
  form.elements.step.append(new Option("any", ""), ...allSteps.map((step) => new Option(step, step)));
  $("pick-step").hidden = allSteps.length < 2;
  form.elements.run.append(new Option("both", ""), ...index.runs.map((run, i) => new Option(run.name, i)));
  $("pick-run").hidden = index.runs.length < 2;
  form.elements.outcome.append(new Option("any", ""), ...["right", "wrong"].map((outcome) => new Option(outcomeWord(outcome), outcome)));
  form.elements.sort.append(new Option("in order", ""), new Option([...new Set(rows.map(spreadOf))].join(", "), "spread"), new Option("length", "length"), new Option("shortest", "shortest"));
  if (TALKS) addTurnChoices();
  const spreads = [...new Set(rows.map(spreadOf))].join(" or ");
  $("list-hint").textContent = `Bar in the list: ${spreads}, ${DEVIATION}.${rows.some((row) => row.no_scores) ? " No scores: the method gave the response none; why, it says above the text." : ""}`;
  segments("overlay", index.overlays.map((name) => [name, OVERLAYS[name].name]));
  segments("view", [["one", "One"], ["side", "Side by side"]]);
  bar.elements.method.append(...METHODS.map((name) => new Option(name, name)));
  $("pick-method").hidden = METHODS.length < 2;
  bar.elements.epoch.append(new Option("mean", ""), ...Array.from({ length: epochs }, (_, k) => new Option(k + 1, k + 1)));
}
function showEpochs() {
  $("pick-epoch").hidden = epochs < 2 || state.overlay !== "received";
}

function head() {
  $("subtitle").textContent = index.subtitle;
  if (index.notes.length) {
    $("notes").hidden = false;
    $("notes").firstElementChild.textContent = index.notes.length === 1 ? "One thing to know about this data" : `${index.notes.length} things to know about this data`;
    for (const note of index.notes) visible($("notes").lastElementChild.appendChild(make("li")), note);
  }
  for (const line of index.foot) $("foot").append(make("p", "", line));
}

// What arrived, in words: a sentence for each run, and what does not fit the loss; examples lead to their tokens.
const nameIn = (link, run) => (run ? "b." : "") + new URLSearchParams(link.slice(1)).get("rollout");
function drawReceipt() {
  for (const [place, { run, summary, unseen, findings }] of index.receipt.entries()) {
    const name = index.runs.length > 1 ? `${index.runs[run].name}: ` : "";
    const wrong = findings.some((finding) => finding.mismatch);
    const box = make("div", wrong ? "receipt wrong" : "receipt");
    visible(box.appendChild(make("p", "said")), name + summary);
    for (const { mismatch, name, what, where, examples, causes } of findings) {
      const one = make("details", mismatch ? "finding wrong" : "finding");
      one.open = mismatch;
      const head = one.appendChild(make("summary"));
      head.append(shownText("b", name), " ", shownText("span", what));
      const list = one.appendChild(make("ul"));
      list.append(shownText("li", where));
      for (const { text, link } of examples) {
        const shown = shownText(link && byName.has(nameIn(link, run)) ? "a" : "span", text);
        if (shown.tagName === "A") shown.href = link.replace("rollout=", run ? "rollout=b." : "rollout=");
        list.appendChild(make("li")).append(shown);
      }
      if (causes) list.append(shownText("li", `Usual causes: ${causes}`));
      box.append(one);
    }
    // Once, below the last run of which it is true.
    if (unseen !== index.receipt[place + 1]?.unseen) visible(box.appendChild(make("p", "quiet")), unseen);
    $("receipt").append(box);
  }
  $("receipt").hidden = !index.receipt.length;
}

// Everything that the address says; returns the rollout that is open then.
async function start() {
  const named = readHash();
  setForms();
  await search();
  choose();
  shownGroup = -1;
  const first = named >= 0 ? rows[named] : shown.length ? telling(shown) : null;
  if (first) await open(first.i, named >= 0);
  return first;
}
addEventListener("hashchange", async () => {
  if (location.hash === written) return;
  await start();
  repaint();
});
dark.addEventListener("change", () => {
  palette.clear();
  plots.forEach((p) => p.redraw(false));
  drawStrips();
  pages.forEach(drawPageStrips);
});
head();
drawReceipt();
drawTraining();
drawPositions();
if (TALKS) drawTurns();
if (!rows.length) {
  $("nothing").textContent = index.nothing;
  $("nothing").hidden = false;
  $("bench").hidden = form.hidden = true;
} else {
  setUp();
  const first = await start();
  if (first) list.scrollTop = items[first.i].offsetTop - list.clientHeight / 3;
}
document.documentElement.dataset.ready = "yes";
