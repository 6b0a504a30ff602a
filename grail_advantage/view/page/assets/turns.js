// Conversations: means by turn, the choice by turns and reward, and the turns of a response. Only in pages that have some.

// A turn is its bounds among the tokens, its reward, the advantage that all its tokens have, and how many of its calls failed.
function failedCalls(row) {
  const count = row.turns.reduce((sum, turn) => sum + turn[4], 0);
  return count ? `${plural(count, "call")} failed` : "";
}

function drawTurns() {
  const section = make("section", "", undefined, { "aria-labelledby": "turns-title" });
  const head = make("div", "section-head");
  head.append(make("h2", "", "By turn", { id: "turns-title" }), make("p", "quiet", "Means over the responses that reach the turn, and their share; in brackets how many" + DASHES));
  const host = make("div", "curves");
  section.append(head, host);
  $("rollouts").before(section);
  for (const curve of index.by_turn) addCurve(curve, host, "turn");
}

// Choices by number of turns and by reward, before the last choice, that of the order.
function addTurnChoices() {
  const sort = form.querySelector(".push");
  const pick = (text, input) => {
    const label = make("label", "pick", `${text} `);
    label.append(input);
    sort.before(label);
  };
  const counts = [...new Set(rows.map((row) => row.turns.length))].sort((a, b) => a - b);
  const turns = make("select", "", undefined, { name: "turns" });
  turns.append(new Option("any", ""), ...counts.map((count) => new Option(count, count)));
  pick("Turns", turns);
  for (const [name, text] of [["from", "Reward from"], ["to", "to"]]) pick(text, make("input", "", undefined, { type: "number", step: "any", name }));
  for (const [value, text] of Object.entries({ turns: "most turns", "-turns": "fewest turns", reward: "highest reward", "-reward": "lowest reward" })) {
    form.elements.sort.append(new Option(text, value));
  }
  form.elements.answer.parentElement.hidden = rows.every((row) => row.answer === null);
}
function turnsChosen(row) {
  const least = state.from === "" || (row.reward !== null && row.reward >= Number(state.from));
  const most = state.to === "" || (row.reward !== null && row.reward <= Number(state.to));
  return least && most && (state.turns === "" || row.turns.length === Number(state.turns));
}
// Responses without a reward come last.
function sortByTurns() {
  const sign = state.sort.startsWith("-") ? 1 : -1;
  const value = { turns: (row) => row.turns.length, reward: (row) => row.reward ?? sign * Infinity }[state.sort.replace("-", "")];
  if (value) shown.sort((a, b) => sign * (value(a) - value(b)) || 0);
}

// Rewards and advantages of all turns, above the text.
function turnTable(page) {
  const { row } = page;
  const box = make("div", "turns", undefined, { tabindex: 0, role: "region", "aria-label": "Turns" });
  const table = box.appendChild(make("table"));
  const line = (name, cells) => {
    const tr = table.appendChild(make("tr"));
    tr.append(make("th", "", name, { scope: "row" }), ...cells);
  };
  line("turn", row.turns.map(([start], k) => {
    const cell = make("th", "", undefined, { scope: "col" });
    const button = cell.appendChild(make("button", "", k + 1, { type: "button", "aria-label": `To turn ${k + 1}` }));
    button.addEventListener("click", () => (point(page, start, true), page.spans[start].scrollIntoView({ block: "center" })));
    return cell;
  }));
  const values = (name, at) => row.turns.some((turn) => turn[at] !== null) && line(name, row.turns.map((turn) => make("td", "", number(turn[at]))));
  values("reward", 2);
  values("advantage", 3);
  if (failedCalls(row)) line("failed calls", row.turns.map((turn) => make("td", "", turn[4] || "")));
  return box;
}
// Before each turn a line with its reward and its advantage.
function markTurns(page) {
  const { row } = page;
  row.turns.forEach(([start, , reward, advantage, failed], k) => {
    const parts = [`turn ${k + 1}`];
    if (reward !== null) parts.push(`reward ${number(reward)}`);
    if (failed) parts.push(reward === 0 ? `${plural(failed, "call")} failed: 0 is no judgement` : `${plural(failed, "call")} failed`);
    if (advantage !== null) parts.push(`advantage ${number(advantage)}`);
    page.spans[start].before(make("span", failed ? "turn failed" : "turn", parts.join(" · "), { "aria-hidden": true }));
  });
}
