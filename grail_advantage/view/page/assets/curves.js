// Plots over the steps of the training.

const plots = [];
const LINES = ["accent", "ink", "ink-3", "line-2"];
const axis = (extra) => ({
  stroke: () => ink("ink-3"),
  font: "11px Inter, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
  grid: { show: true, stroke: () => ink("line"), width: 1 },
  ticks: { show: false },
  ...extra,
});
const valueAxis = (size, space) => axis({ size, space, values: (u, splits) => splits.map((value) => number(value)) });
const stepAxis = (size) =>
  axis({ size, space: 60, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000] });
const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const made = plots.find((one) => one.root.parentElement === target);
    if (made && target.clientWidth && made.width !== target.clientWidth) made.setSize({ width: target.clientWidth, height: made.height });
  }
});
function plot(host, options, data) {
  const made = new uPlot({ width: host.clientWidth || 300, legend: { show: false }, ...options }, data, host);
  plots.push(made);
  observer.observe(host);
  return made;
}

function addCurve(curve, place = $("curves"), unit = "step") {
  const link = unit === "step" && steps.length;
  const figure = make("figure", "curve");
  const caption = make("figcaption");
  const now = make("span", "now");
  const host = make("div", `plot${link ? " link" : ""}`, undefined, { role: "img" });
  const labels = [...new Set(curve.lines.map((line) => line.label))];
  const several = labels.length > 1;
  caption.append(make("span", "name", curve.title, { title: curve.unit ? `${curve.title}, ${curve.unit}` : curve.title }), now);
  figure.append(caption, host);
  const values = labels.map(() => make("b"));
  if (several) {
    const key = make("div", "key");
    labels.forEach((label, i) => key.append(keyEntry("", LINES[i % LINES.length], `${label} `, values[i])));
    figure.append(key);
  }
  place.append(figure);

  const xs = [...new Set(curve.lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const along = (line, values) => {
    const known = new Map(line.steps.map((step, i) => [step, values[i]]));
    return xs.map((x) => known.get(x) ?? null);
  };
  const lines = curve.lines.map((line) => along(line, line.values));
  const counts = curve.lines.map((line) => line.counts && along(line, line.counts));
  const text = (s, i) => number(lines[s][i]) + (counts[s]?.[i] ? ` (${number(counts[s][i])})` : "");
  const first = (ys) => ys.findIndex((y) => y !== null);
  const last = (ys) => ys.findLastIndex((y) => y !== null);
  // The values at a step; of two runs, theirs in order: 0.91 | 0.88.
  const show = (i) => {
    now.textContent = "";
    if (i < 0) return;
    const texts = labels.map((label) => [...lines.keys()].filter((s) => curve.lines[s].label === label).map((s) => text(s, i)).join(" | "));
    values.forEach((value, l) => (value.textContent = texts[l]));
    now.append(several ? "" : texts[0], make("small", "", `${unit} ${xs[i]}`));
  };
  // Of runs that ended at different steps, the last that all have.
  const common = xs.findLastIndex((_, i) => lines.every((ys) => ys[i] !== null));
  const start = common < 0 ? last(lines[0]) : common;
  const described = curve.lines.map((line, s) => {
    const ys = lines[s];
    if (first(ys) < 0) return "";
    const name = (several ? `${line.label}, ` : "") + (index.runs.length > 1 ? `${index.runs[line.run].name}, ` : "");
    return name + [first(ys), last(ys)].map((i) => `${text(s, i)} at ${unit} ${xs[i]}`).join(", ");
  });
  host.setAttribute("aria-label", `${curve.title}: ${described.filter(Boolean).join("; ")}`);
  const single = first(lines[0]) === last(lines[0]);
  const made = plot(
    host,
    {
      height: 128,
      padding: [8, 10, 0, 0],
      scales: {
        x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        // Values that are all 0 would have an axis up to 100.
        y: { range: (u, low, high) => (low === 0 && high === 0 ? [0, 1] : low === null ? [null, null] : uPlot.rangeNum(low, high, 0.1, true)) },
      },
      axes: [stepAxis(24), valueAxis(44, 34)],
      series: [
        {},
        ...curve.lines.map((line) => ({
          stroke: () => ink(LINES[labels.indexOf(line.label) % LINES.length]),
          width: line.run ? 1.25 : 1.75,
          dash: line.run ? [4, 3] : undefined,
          spanGaps: true,
          points: { show: single || line.values.length < 3, size: 5 },
        })),
      ],
      cursor: { sync: { key: unit }, y: false, drag: { x: false, y: false }, points: { size: 6, stroke: () => ink("paper"), width: 1 } },
      hooks: { setCursor: [(u) => show(u.cursor.idx ?? start)] },
    },
    [xs, ...lines],
  );
  show(start);
  if (!link) return;
  made.over.addEventListener("click", () => {
    const x = xs[made.cursor.idx ?? 0];
    chooseStep(String(steps.reduce((best, step) => (Math.abs(step - x) < Math.abs(best - x) ? step : best))));
    $("rollouts").scrollIntoView();
    $("rollouts").focus({ preventScroll: true });
  });
}

function drawTraining() {
  if (!index.curves.length && !index.more.length) return;
  $("training").hidden = false;
  for (const curve of index.curves) addCurve(curve);
  const click = steps.length ? `${touch.matches ? "Tap" : "Click"} a step to read its rollouts` : "";
  $("training-hint").textContent = (click + DASHES).replace(/^ · /, "");
  const more = $("more-curves");
  more.parentElement.hidden = !index.more.length;
  more.append(new Option("add…", ""), ...index.more.map((curve, i) => new Option(curve.title, i)));
  more.addEventListener("change", () => {
    if (more.value === "") return;
    addCurve(index.more[Number(more.value)]);
    more.selectedOptions[0].disabled = true;
    more.value = "";
  });
}
