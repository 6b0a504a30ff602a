// The problem, the responses to it as lines of colour, and the open responses.

let pages = [];
let turn = 0;
let strips = [];
let shownGroup = -1;

// Opens a rollout; `keep` leaves the token that is pointed at.
async function open(i, keep = false) {
  if (i !== state.row && !keep) state.token = -1;
  state.row = i;
  drawList();
  writeHash();
  const mine = ++turn;
  const group = rows[i].group;
  if (state.view === "one" || group !== shownGroup) await drawPages(mine);
  else markPages();
  if (mine !== turn) return;
  if (group !== shownGroup) drawProblem(groups[group]);
  shownGroup = group;
  markStrips();
}

// The group and the other run's group of the same problem at the nearest step, by run.
function companyOf(group) {
  const same = groups.filter((other) => other.run !== group.run && other.problem === group.problem);
  same.sort((a, b) => Math.abs(a.step - group.step) - Math.abs(b.step - group.step));
  return [group, ...same.slice(0, 1)].sort((a, b) => a.run - b.run);
}
// Correct and incorrect in turns, so that both are in sight.
function together(group) {
  const all = companyOf(group).flatMap((g) => g.rows);
  const correct = all.filter((row) => row.outcome === "right");
  const others = all.filter((row) => row.outcome !== "right");
  const out = [];
  for (let i = 0; i < Math.max(correct.length, others.length); i++) out.push(...correct.slice(i, i + 1), ...others.slice(i, i + 1));
  return out;
}

function drawProblem(group) {
  const problem = index.problems[group.problem];
  const host = $("problem");
  host.textContent = "";
  const prompt = make("div", "prompt", "", { tabindex: 0, role: "region", "aria-label": "Prompt" });
  visible(prompt, problem.prompt.trim() || "(no prompt in the dump)", false);
  host.append(prompt);
  if (problem.ground_truth !== null) {
    const truth = make("p", "truth", "Ground truth ");
    truth.append(shownText("b", problem.ground_truth));
    if (problem.id !== null) truth.append(" · ", shownText("span", problem.id));
    host.append(truth);
  }
  strips = [];
  for (const one of companyOf(group)) {
    const box = make("div", "strips");
    const run = index.runs.length > 1 ? `${index.runs[one.run].name}, ` : "";
    const step = allSteps.length > 1 ? `Step ${one.step}: ` : "";
    const counts = ["right", "wrong"].map((outcome) => [one.rows.filter((row) => row.outcome === outcome).length, outcomeWord(outcome)]);
    const outcomes = counts.filter(([count]) => count).map(([count, word]) => `, ${count} ${index.verdict && "with "}${word}`);
    box.append(make("h3", "", `${run}${run ? step.toLowerCase() : step}${plural(one.rows.length, "response")} to this problem${outcomes.join("")}`));
    for (const row of one.rows) {
      const button = make("button", "strip", "", { type: "button" });
      const canvas = make("canvas", "", undefined, { "aria-hidden": true });
      const meta = make("span", "meta");
      meta.append(shownText("span", headline(row, 40)), ` · ${sizeOf(row)}`);
      button.append(glyph(row.outcome), canvas, meta);
      button.addEventListener("click", () => {
        open(row.i);
        const page = pages.find((p) => p.row.i === row.i);
        if (state.view === "side" && page) page.element.scrollIntoView({ block: "nearest", inline: "start" });
      });
      box.append(button);
      strips.push({ row, canvas, button });
    }
    host.append(box);
  }
  const key = make("p", "key marks");
  if (strips.some(({ row }) => row.span)) key.append(keyEntry("", "accent", "answer"));
  if (strips.some(({ row }) => row.wrong_step)) key.append(keyEntry("", "ink", "incorrect step"));
  host.append(key);
  drawStrips();
}

async function drawStrips() {
  const mine = strips;
  const longest = Math.max(1, ...mine.map(({ row }) => row.length));
  for (const strip of mine) {
    const data = await rollout(strip.row.i);
    if (mine !== strips) return;
    drawStrip(strip.canvas, strip.row, data, state.overlay, strip.row.length / longest);
  }
}
function markStrips() {
  for (const { row, button } of strips) button.setAttribute("aria-current", row.i === state.row);
}

function facts(row) {
  const host = make("header", "facts");
  // "Correct"; a reward or a verdict of another meaning by its own name.
  const word = outcomeWord(row.outcome);
  const said = index.verdict ? word : word[0].toUpperCase() + word.slice(1);
  host.append(make("strong", row.outcome ?? "", `${SIGNS[row.outcome] ?? ""} ${said}`.trim()));
  if (index.verdict) host.append(make("b", "", rewardText(row)));
  const fact = (name, text, tag = "span", title = "") => {
    const element = make("span", "", `${name} `, { title });
    element.append(shownText(tag, text));
    host.append(element);
  };
  if (row.answer !== null) fact("answer", row.answer.slice(0, 300), "code");
  if (allSteps.length > 1) fact("step", String(row.step));
  if (index.runs.length > 1) fact("of", index.runs[row.run].name);
  fact("tokens", number(row.length));
  if (row.reward !== null && !index.verdict) fact("reward", number(row.reward));
  if (row.advantage !== null && !ownAdvantages(row)) fact("base advantage", number(row.advantage), "span", "the response's own, as GRPO has it, before the method");
  if (row.spread !== null) fact(spreadOf(row), number(row.spread), "span", DEVIATION);
  if (row.unplaced?.length) fact("rewards of no certain turn", row.unplaced.map((reward) => number(reward)).join(", "));
  const reason = row.no_scores_of ? row.no_scores_of[state.method] : row.no_scores;
  const badge = (text) => host.append(make("span", "badge", text));
  const true_ = row.answer !== null && row.answer === problemOf(row).ground_truth;
  if (true_ && row.outcome === "wrong") badge(`the answer is the ground truth: ${index.verdict || "the verdict"} asks for more`);
  if (row.truncated) badge("truncated: cut at the length limit");
  if (reason) badge(`no scores: ${reason}`);
  if (row.updates === 0) badge("left out of the update");
  if (row.wrong_step) badge("incorrect step: wavy line");
  if (row.turns?.length > 1) badge("on grey: a tool or a user wrote it");
  if (TALKS && failedCalls(row)) badge(`${failedCalls(row)}: verl's reward of 0 is no judgement`);
  return host;
}

async function drawPages(mine) {
  const host = $("pages");
  const side = state.view === "side";
  const chosen = side ? together(groups[rows[state.row].group]) : [rows[state.row]];
  const first = await rollout(chosen[0].i);
  if (mine !== turn) return;
  host.className = side ? "pages side" : "pages";
  const region = { tabindex: 0, role: "region", "aria-label": "Responses side by side" };
  for (const [name, value] of Object.entries(region)) side ? host.setAttribute(name, value) : host.removeAttribute(name);
  pages = chosen.map(makePage);
  host.replaceChildren(...pages.map((page) => page.element));
  fillPage(pages[0], first);
  markPages();
  fillOthers(mine);
}
async function fillOthers(mine) {
  for (const page of pages.slice(1)) {
    const data = await rollout(page.row.i);
    if (mine !== turn) return;
    fillPage(page, data);
  }
}

function makePage(row) {
  const label = `Response ${row.row}, step ${row.step}, ${outcomeWord(row.outcome)}`;
  const element = make("article", `page ${row.outcome ?? ""}`, "", { "aria-label": label });
  element.append(facts(row));
  return { row, element, spans: null, data: null };
}

function fillPage(page, data) {
  const { row, element } = page;
  page.data = data;
  if (METHODS.length > 1) {
    page.strips = METHODS.map((method) => {
      const reason = row.no_scores_of?.[method];
      const label = `Show ${method}${reason ? `, no scores: ${reason}` : ""}`;
      const button = make("button", "strip", "", { type: "button", "aria-label": label });
      const canvas = make("canvas", "", undefined, { "aria-hidden": true });
      button.append(make("span", "glyph", method), canvas, make("span", "meta", reason ? "no scores" : ""));
      button.addEventListener("click", () => setMethod(method));
      return { method, button, canvas };
    });
    const box = make("div", "strips methods");
    box.append(make("h3", "", "The same response under each method"), ...page.strips.map((s) => s.button));
    element.append(box);
  }
  const label = `Tokens of response ${row.row}, ${data.n} of them; arrow keys move between them`;
  const box = make("div", "tokens", "", { role: "listbox", "aria-orientation": "horizontal", "aria-label": label });
  page.spans = new Array(data.n);
  let line = null;
  for (let t = 0; t < data.n; t++) {
    if (!line) {
      line = make("div", "line", "", { role: "presentation" });
      box.append(line);
    }
    const span = make("span", "", undefined, { role: "option", "aria-selected": false });
    const text = data.words.texts[data.ids[t]];
    if (text === "") span.append(make("span", "sign soft", "◌"));
    else if (data.words.special.has(data.ids[t])) visible(span.appendChild(make("span", "sign")), text);
    else visible(span, text);
    if (!/\S/.test(text)) span.setAttribute("aria-label", spoken(text));
    page.spans[t] = span;
    line.append(span);
    if (text.includes("\n")) line = null;
  }
  page.places = new Map(page.spans.map((span, t) => [span, t]));
  paint(page);
  if (TALKS) {
    page.element.append(turnTable(page));
    markTurns(page);
  }
  if (data.n) page.spans[0].tabIndex = 0;
  page.element.append(box);
  const on = (name, act) =>
    box.addEventListener(name, (event) => {
      const t = page.places.get(event.target.closest(".t"));
      if (t !== undefined) act(t);
    });
  on("pointerover", (t) => readOut(page, t));
  on("click", (t) => point(page, t, true));
  on("focusin", (t) => page.pointed !== t && point(page, t, false));
  box.addEventListener("pointerleave", () => readOut(page, page.pointed));
  box.addEventListener("keydown", (event) => move(page, event));
  drawPageStrips(page);
  if (page.row.i === state.row && state.token >= 0 && state.token < data.n) {
    point(page, state.token, false);
    page.spans[state.token].scrollIntoView({ block: "center" });
  }
}

function drawPageStrips(page) {
  for (const { method, button, canvas } of page.strips ?? []) {
    const overlay = ["score", "advantage"].includes(state.overlay) ? state.overlay : index.overlays[0];
    drawStrip(canvas, page.row, page.data, overlay, 1, column(page.data, overlay, method) ?? new Float32Array(page.data.n).fill(NaN));
    button.setAttribute("aria-pressed", method === state.method);
  }
}
function markPages() {
  drawLegend();
  if (state.token < 0) readOut(null);
}
