// Plots over the steps of the training.
parts.push((r) => {
  const { $, make, keyEntry, number, steps, touch, state, ink, index } = r;
  const plots = [];
  const LINES = ["accent", "ink", "ink-3", "line-2"];
  const FONT = "11px Inter, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000];
  const axis = (extra) => ({
    stroke: () => ink("ink-3"),
    font: FONT,
    grid: { show: true, stroke: () => ink("line"), width: 1 },
    ticks: { show: false },
    ...extra,
  });
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = plots.find((p) => p.root.parentElement === target);
      if (plot && target.clientWidth && plot.width !== target.clientWidth) plot.setSize({ width: target.clientWidth, height: plot.height });
    }
  });
  function plot(host, options, data) {
    const made = new uPlot({ width: host.clientWidth || 300, legend: { show: false }, ...options }, data, host);
    plots.push(made);
    observer.observe(host);
    return made;
  }

  function drawSteps(u) {
    // The steps that there are rollouts of, along the axis, and the one that is chosen.
    const pen = u.ctx;
    const dense = devicePixelRatio || 1;
    const chosen = state.step === "" ? null : Number(state.step);
    pen.save();
    pen.fillStyle = ink("accent");
    if (steps.length * 4 < u.bbox.width / dense) {
      for (const step of steps) {
        const x = u.valToPos(step, "x", true);
        if (x < u.bbox.left - 1 || x > u.bbox.left + u.bbox.width + 1) continue;
        pen.beginPath();
        pen.arc(x, u.bbox.top + u.bbox.height, 1.8 * dense, 0, 7);
        pen.fill();
      }
    }
    if (chosen !== null) {
      pen.globalAlpha = 0.6;
      pen.fillRect(u.valToPos(chosen, "x", true) - dense / 2, u.bbox.top, dense, u.bbox.height);
    }
    pen.restore();
  }

  function addCurve(curve) {
    const figure = make("figure", "curve");
    const caption = make("figcaption");
    const now = make("span", "now");
    caption.append(make("span", "name", curve.title), now);
    caption.firstChild.title = curve.unit ? `${curve.title}, ${curve.unit}` : curve.title;
    const host = make("div", `plot${steps.length ? " link" : ""}`);
    figure.append(caption, host);
    const several = new Set(curve.lines.map((line) => line.label)).size > 1;
    const labels = [...new Set(curve.lines.map((line) => line.label))];
    const values = [];
    if (several) {
      const key = make("div", "key");
      for (const [i, label] of labels.entries()) {
        values.push(make("b"));
        key.append(keyEntry("", LINES[i % LINES.length], `${label} `, values[i]));
      }
      figure.append(key);
    }
    $("curves").append(figure);
    const xs = [...new Set(curve.lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
    const at = new Map(xs.map((x, i) => [x, i]));
    const data = [xs];
    for (const line of curve.lines) {
      const ys = new Array(xs.length).fill(null);
      line.steps.forEach((step, i) => (ys[at.get(step)] = line.values[i]));
      data.push(ys);
    }
    const last = (ys) => ys.reduce((found, y, i) => (y === null ? found : i), -1);
    const show = (i) => {
      const shown = i ?? last(data[1]);
      now.textContent = "";
      if (shown < 0) return;
      // Of two runs, theirs in order: 0.91 | 0.88.
      const said = (label) => curve.lines.flatMap((line, s) => (line.label === label ? [number(data[s + 1][shown])] : [])).join(" | ");
      values.forEach((value, l) => (value.textContent = said(labels[l])));
      now.append(several ? "" : said(labels[0]), make("small", "", `step ${xs[shown]}`));
    };
    const first = data[1].findIndex((y) => y !== null);
    host.setAttribute("role", "img");
    host.setAttribute(
      "aria-label",
      `${curve.title}: ` +
        curve.lines
          .map((line, s) => {
            const from = data[s + 1].findIndex((y) => y !== null);
            const to = last(data[s + 1]);
            const who = (several ? `${line.label}, ` : "") + (index.runs.length > 1 ? `${index.runs[line.run].name}, ` : "");
            return from < 0 ? "" : `${who}${number(data[s + 1][from])} at step ${xs[from]}, ${number(data[s + 1][to])} at step ${xs[to]}`;
          })
          .filter(Boolean)
          .join("; "),
    );
    const single = xs.length === 1 || first === last(data[1]);
    const made = plot(
      host,
      {
        height: 128,
        padding: [8, 10, 0, 0],
        scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) } },
        axes: [axis({ size: 24, space: 60, grid: { show: false }, incrs: STEPS }), axis({ size: 44, space: 34, values: (u, splits) => splits.map((v) => number(v)) })],
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
        cursor: { sync: { key: "steps" }, y: false, drag: { x: false, y: false }, points: { size: 6, stroke: () => ink("paper"), width: 1 } },
        hooks: { setCursor: [(u) => show(u.cursor.idx)], draw: [drawSteps] },
      },
      data,
    );
    show(null);
    if (steps.length) {
      made.over.addEventListener("click", () => {
        const x = xs[made.cursor.idx ?? 0];
        const near = steps.reduce((best, step) => (Math.abs(step - x) < Math.abs(best - x) ? step : best), steps[0]);
        r.chooseStep(String(near));
        $("rollouts").scrollIntoView();
        $("rollouts").focus({ preventScroll: true });
      });
    }
  }

  function drawTraining() {
    if (!index.curves.length && !index.more.length) return;
    $("training").hidden = false;
    index.curves.forEach(addCurve);
    const hints = [];
    if (steps.length) hints.push(`${touch.matches ? "Tap" : "Click"} a step to read its rollouts`);
    if (index.runs.length > 1) hints.push(`solid: ${index.runs[0].name}, dashed: ${index.runs[1].name}`);
    $("training-hint").textContent = hints.join(" · ");
    const more = $("more-curves");
    if (!index.more.length) more.parentElement.hidden = true;
    more.append(new Option("add…", ""), ...index.more.map((curve, i) => new Option(curve.title, i)));
    more.addEventListener("change", () => {
      if (more.value === "") return;
      addCurve(index.more[Number(more.value)]);
      more.selectedOptions[0].disabled = true;
      more.value = "";
    });
  }

  Object.assign(r, { plots, axis, plot, STEPS, drawTraining });
});
