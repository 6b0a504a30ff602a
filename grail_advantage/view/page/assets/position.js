// Mean weight by place in the reasoning, of correct and incorrect responses, over all steps or at one; a plot for each method.

const K = index.bins;
const CENTRES = Array.from({ length: K }, (_, k) => ((k + 0.5) * 100) / K);
const placed = METHODS.filter((method) => index.position[method]);
const profiles = [];
const outcomeInk = (outcome) => ink(outcome === "right" ? "accent" : "ink");
const outcomeLine = (outcome, stroke, width) => ({ stroke, width, dash: outcome === "wrong" ? [6, 4] : undefined, points: { show: false } });

function drawPositions() {
  $("position").hidden = !placed.length;
  if (!placed.length) return;
  const others = METHODS.filter((method) => !placed.includes(method));
  if (others.length) $("position-hint").append(`; ${others.join(", ")}: no weights, but advantages`);
  const values = placed.flatMap((method) => index.position[method].all.flatMap((line) => [...line.low, ...line.high, ...line.mean]));
  const known = values.filter((value) => value !== null);
  for (const method of placed) {
    const shown = index.position[method];
    const figure = $("profiles").appendChild(make("figure"));
    const key = make("span", "key");
    const name = METHODS.length > 1 ? method : ["right", "wrong"].map(outcomeWord).join(" against ");
    figure.appendChild(make("figcaption")).append(make("span", "name", name), key);
    for (const line of shown.all) {
      const name = `${outcomeWord(line.outcome)} (${number(line.rows)})`;
      const text = line.run ? `${index.runs[line.run].name}, ${name}` : name;
      key.append(keyEntry(`${line.outcome || "other"}${line.run ? " other" : ""}`, "", text));
    }
    const host = figure.appendChild(make("div", "plot", undefined, { role: "img" }));
    for (const text of index.explained[method]) figure.append(make("p", "quiet", text));
    profiles.push({ method, shown, host, made: plot(host, profileOptions(shown, Math.min(1, ...known), Math.max(1, ...known)), profileData(shown, 0)) });
  }
  const { steps } = profiles[0].shown;
  $("scrub-row").hidden = steps.length < 2;
  $("scrub").max = steps.length;
  showScrub();
}

// First the means over training, with their intervals, then the chosen step's lines over them.
function profileData(shown, step) {
  const data = [CENTRES];
  for (const line of shown.all) data.push(line.mean, line.low, line.high);
  for (const outcome of ["right", "wrong"]) data.push(step ? shown.of_step[outcome][step - 1] : new Array(K).fill(null));
  return data;
}

function profileOptions(shown, low, high) {
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
  const room = Math.max(0.02, (high - low) * 0.14);
  // A weight of 1 is plain GRPO.
  const drawOne = (u) => {
    u.ctx.fillStyle = ink("ink-3");
    u.ctx.fillRect(u.bbox.left, Math.round(u.valToPos(1, "y", true)), u.bbox.width, devicePixelRatio || 1);
  };
  return {
    height: placed.length > 1 ? 180 : 236,
    padding: [10, 26, 0, 0],
    scales: {
      x: { time: false, range: [0, 100] },
      y: { range: (u, a, b) => [Math.min(low - room, a ?? low), Math.max(high + room, b ?? high)] },
    },
    axes: [
      axis({ size: 26, grid: { show: false }, splits: [0, 25, 50, 75, 100], values: () => ["start", "25 %", "50 %", "75 %", "answer"] }),
      valueAxis(44, 28),
    ],
    series,
    bands,
    cursor: { drag: { x: false, y: false }, y: false, points: { show: false } },
    hooks: { drawAxes: [drawOne] },
  };
}

function showScrub() {
  const step = Number($("scrub").value);
  const name = step ? `step ${profiles[0].shown.steps[step - 1]}` : "all steps";
  $("scrub-value").textContent = name;
  $("scrub").setAttribute("aria-valuetext", name);
  for (const { method, shown, host, made } of profiles) {
    made.setData(profileData(shown, step));
    host.setAttribute("aria-label", `Mean weight by place under ${method}, ${name}`);
  }
}
$("scrub").addEventListener("input", showScrub);
