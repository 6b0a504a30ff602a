// Mean weight by place in the reasoning: profiles of correct and incorrect responses, and a map over the steps.

const K = index.bins;
const CENTRES = Array.from({ length: K }, (_, k) => ((k + 0.5) * 100) / K);
let profilePlot = null;
let heatPlot = null;
let heatOutcome = "";
const position = () => index.position[state.method] ?? null;
const numbers = (values) => values.filter((value) => value !== null);
const outcomeInk = (outcome) => ink(outcome === "right" ? "accent" : "ink");
const outcomeLine = (outcome, stroke, width) => ({ stroke, width, dash: outcome === "wrong" ? [6, 4] : undefined, points: { show: false } });

function drawPosition() {
  for (const old of [profilePlot, heatPlot]) if (old) removePlot(old);
  profilePlot = heatPlot = null;
  const shown = position();
  $("position").hidden = !shown;
  if (!shown) return;
  const several = shown.steps.length > 1;
  $("scrub-row").hidden = $("heat-panel").hidden = !several;
  $("scrub").max = shown.steps.length;
  $("profile-key").textContent = "";
  for (const line of shown.all) {
    const name = `${outcomeWord(line.outcome)} (${number(line.rows)})`;
    const text = line.run ? `${index.runs[line.run].name}, ${name}` : name;
    $("profile-key").append(keyEntry(`${line.outcome || "other"}${line.run ? " other" : ""}`, "", text));
  }
  profilePlot = plot($("profile"), profileOptions(shown), profileData(shown, Number($("scrub").value)));
  showScrub();
  if (several) drawHeat(shown);
  drawMethods(several);
}

// All methods' profiles beside each other, where there is room for them.
function drawMethods(several) {
  const named = METHODS.filter((method) => index.position[method]);
  const host = $("methods");
  $("methods-panel").hidden = several || named.length < 2;
  if ($("methods-panel").hidden) return;
  if (!host.children.length) {
    const linesOf = (method) => index.position[method].all.filter((line) => !line.run);
    const values = numbers(named.flatMap(linesOf).flatMap((line) => line.mean));
    const range = [Math.min(1, ...values) - 0.04, Math.max(1, ...values) + 0.04];
    for (const method of named) {
      const button = make("button", "small-plot", "", { type: "button" });
      const plotHost = make("span", "plot");
      button.append(make("span", "name", method), plotHost);
      button.addEventListener("click", () => setMethod(method));
      host.append(button);
      const lines = linesOf(method);
      const options = {
        height: 78,
        padding: [6, 4, 4, 0],
        scales: { x: { time: false, range: [0, 100] }, y: { range } },
        axes: [{ show: false }, valueAxis(32, 26)],
        series: [{}, ...lines.map((line) => outcomeLine(line.outcome, () => outcomeInk(line.outcome), 1.5))],
        cursor: { show: false },
      };
      plot(plotHost, options, [CENTRES, ...lines.map((line) => line.mean)]);
    }
  }
  [...host.children].forEach((button, i) => button.setAttribute("aria-pressed", named[i] === state.method));
}

// First the means over training, with their intervals, then the chosen step's lines over them.
function profileData(shown, step) {
  const data = [CENTRES];
  for (const line of shown.all) data.push(line.mean, line.low, line.high);
  for (const outcome of ["right", "wrong"]) data.push(step ? shown.heat[outcome][step - 1] : new Array(K).fill(null));
  return data;
}

function profileOptions(shown) {
  const tone = (line, alpha) => () => {
    const base = line.run ? ink("ink-3") : outcomeInk(line.outcome);
    const share = alpha || (Number($("scrub").value) > 0 ? 30 : 100);
    return `color-mix(in srgb, ${base} ${share}%, transparent)`;
  };
  const series = [{}];
  const bands = [];
  for (const line of shown.all) {
    series.push(outcomeLine(line.outcome, tone(line), line.run ? 1.25 : 2), outcomeLine("", "transparent", 0), outcomeLine("", "transparent", 0));
    if (!line.run) bands.push({ series: [series.length - 1, series.length - 2], fill: tone(line, 11) });
  }
  for (const outcome of ["right", "wrong"]) series.push({ ...outcomeLine(outcome, () => outcomeInk(outcome), 2), spanGaps: true });
  const values = numbers(shown.all.flatMap((line) => [...line.low, ...line.high, ...line.mean]));
  const low = Math.min(1, ...values);
  const high = Math.max(1, ...values);
  const room = Math.max(0.02, (high - low) * 0.14);
  // A weight of 1 is plain GRPO.
  const drawOne = (u) => {
    u.ctx.fillStyle = ink("ink-3");
    u.ctx.fillRect(u.bbox.left, Math.round(u.valToPos(1, "y", true)), u.bbox.width, devicePixelRatio || 1);
  };
  return {
    height: 236,
    padding: [10, 26, 0, 0],
    scales: {
      x: { time: false, range: [0, 100] },
      y: { range: (u, a, b) => [Math.min(low - room, a ?? low), Math.max(high + room, b ?? high)] },
    },
    axes: [
      axis({ size: 26, grid: { show: false }, splits: [0, 25, 50, 75, 100], values: () => ["start", "25 %", "50 %", "75 %", "answer"] }),
      valueAxis(44, 40),
    ],
    series,
    bands,
    cursor: { drag: { x: false, y: false }, y: false, points: { show: false } },
    hooks: { drawAxes: [drawOne] },
  };
}

function showScrub() {
  const shown = position();
  const step = Number($("scrub").value);
  const name = step ? `step ${shown.steps[step - 1]}` : "all steps";
  $("scrub-value").textContent = name;
  $("scrub").setAttribute("aria-valuetext", name);
  profilePlot.setData(profileData(shown, step));
  const lines = step ? ["right", "wrong"].map((outcome) => [outcome, shown.heat[outcome][step - 1]]) : shown.all.map((line) => [line.outcome, line.mean]);
  const sentences = lines.map(([outcome, means]) => [outcomeWord(outcome), numbers(means)]).filter(([, means]) => means.length);
  const spokenLines = sentences.map(
    ([word, means]) =>
      `${word}: ${number(means[0])} at the start, ${number(means[Math.floor(means.length / 2)])} in the middle, ${number(means.at(-1))} before the answer`,
  );
  $("profile").setAttribute("aria-label", `Mean weight by place, ${name}. ${spokenLines.join("; ")}`);
}
$("scrub").addEventListener("input", showScrub);

function drawHeat(shown) {
  const outcomes = ["", "right", "wrong"].filter((outcome) => numbers(shown.heat[outcome].flat()).length);
  if (!outcomes.includes(heatOutcome)) heatOutcome = outcomes[0] ?? "";
  const word = (outcome) => (outcome ? outcomeWord(outcome) : "all");
  const nameHeat = () =>
    $("heat").setAttribute("aria-label", `Mean weight by training step (across) and place in the reasoning (upwards), ${word(heatOutcome)} responses`);
  segments($("heat-outcome"), "heat-outcome", outcomes.map((outcome) => [outcome, word(outcome)]), heatOutcome, (outcome) => {
    heatOutcome = outcome;
    heatPlot.redraw(false);
    nameHeat();
  });
  nameHeat();
  const xs = shown.steps;
  // A step's cells end halfway to its neighbours.
  const edges = xs.slice(1).map((x, i) => (xs[i] + x) / 2);
  edges.unshift(2 * xs[0] - edges[0]);
  edges.push(2 * xs.at(-1) - edges.at(-1));
  const drawCells = (u) => {
    const across = edges.map((x) => Math.round(u.valToPos(x, "x", true)));
    shown.heat[heatOutcome].forEach((means, i) => {
      means.forEach((mean, k) => {
        if (mean === null) return;
        const [top, bottom] = [k + 1, k].map((edge) => Math.round(u.valToPos((edge * 100) / K, "y", true)));
        u.ctx.fillStyle = colour(signedClass(clamp(Math.log(Math.max(mean, 1e-9)) / Math.log(shown.limit), -1, 1)));
        u.ctx.fillRect(across[i], top, across[i + 1] - across[i], bottom - top);
      });
    });
  };
  const options = {
    height: 236,
    padding: [10, 8, 0, 0],
    scales: { x: { time: false, range: [edges[0], edges.at(-1)] }, y: { range: [0, 100] } },
    axes: [stepAxis(26), axis({ size: 44, grid: { show: false }, splits: [0, 50, 100], values: () => ["start", "50 %", "answer"] })],
    series: [{}, outcomeLine("", "transparent", 0)],
    cursor: { drag: { x: false, y: false }, points: { show: false }, y: false, x: false },
    hooks: { drawAxes: [drawCells] },
  };
  heatPlot = plot($("heat"), options, [xs, xs.map(() => null)]);
  scaleBar($("heat-legend"), true, ratioTicks(shown.limit), "mean weight");
}
