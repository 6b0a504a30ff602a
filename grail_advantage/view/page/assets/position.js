// Mean weight by place in the reasoning.
parts.push((r) => {
  const { $, make, keyEntry, clamp, number, METHODS, state, segments, signedClass, colour, ink, scaleBar, ratioTicks, plots, axis,
    plot, STEPS, index } = r;
  let profilePlot = null;
  let heatPlot = null;
  let heatOutcome = "";
  const found = () => index.position[state.method] ?? null;

  function drawPosition() {
    const position = found();
    for (const old of [profilePlot, heatPlot]) {
      if (!old) continue;
      plots.splice(plots.indexOf(old), 1);
      old.destroy();
    }
    profilePlot = heatPlot = null;
    $("position").hidden = !position;
    if (!position) return;
    const several = position.steps.length > 1;
    $("scrub-row").hidden = $("heat-panel").hidden = !several;
    $("scrub").max = position.steps.length;
    $("profile-key").textContent = "";
    for (const line of position.all) {
      const name = line.outcome ? `${line.outcome} (${number(line.rows)})` : `not judged (${number(line.rows)})`;
      const text = line.run ? `${index.runs[line.run].name}, ${name}` : name;
      $("profile-key").append(keyEntry(`${line.outcome || "other"}${line.run ? " other" : ""}`, "", text));
    }
    profilePlot = plot($("profile"), profileOptions(position), profileData(position, Number($("scrub").value)));
    showScrub();
    if (several) drawHeat(position);
    drawMethods(several);
  }

  // All methods' profiles beside each other, where there is room for them.
  const small = [];
  function drawMethods(several) {
    const named = METHODS.filter((method) => index.position[method]);
    $("methods-panel").hidden = several || named.length < 2;
    if ($("methods-panel").hidden) return;
    if (!small.length) {
      const all = named.flatMap((method) => index.position[method].all.filter((line) => !line.run));
      const values = all.flatMap((line) => line.mean).filter((v) => v !== null);
      const range = [Math.min(1, ...values) - 0.04, Math.max(1, ...values) + 0.04];
      for (const method of named) {
        const button = make("button", "small-plot", "", { type: "button" });
        const host = make("span", "plot");
        button.append(make("span", "name", method), host);
        button.addEventListener("click", () => r.setMethod(method));
        $("methods").append(button);
        const lines = index.position[method].all.filter((line) => !line.run);
        const made = plot(
          host,
          {
            height: 78,
            padding: [6, 4, 4, 0],
            scales: { x: { time: false, range: [0, 100] }, y: { range } },
            axes: [{ show: false }, axis({ size: 32, space: 26, values: (u, splits) => splits.map((v) => number(v)) })],
            series: [{}, ...lines.map((line) => ({ stroke: () => ink(line.outcome === "right" ? "accent" : "ink"), width: 1.5, dash: line.outcome === "wrong" ? [5, 3] : undefined, points: { show: false } }))],
            cursor: { show: false },
          },
          [centres, ...lines.map((line) => line.mean)],
        );
        small.push({ method, button, made });
      }
    }
    for (const { method, button } of small) button.setAttribute("aria-pressed", method === state.method);
  }

  const K = index.bins;
  const centres = Array.from({ length: K }, (_, k) => ((k + 0.5) * 100) / K);
  // First the means over training, with their intervals, then the chosen step's lines over them.
  function profileData(position, chosen) {
    const data = [centres];
    for (const line of position.all) data.push(line.mean, line.low, line.high);
    for (const outcome of ["right", "wrong"]) data.push(chosen ? position.heat[outcome][chosen - 1] : new Array(K).fill(null));
    return data;
  }
  function profileOptions(position) {
    const faint = () => Number($("scrub").value) > 0;
    const tone = (line, alpha) => () => {
      const base = ink(line.run ? "ink-3" : line.outcome === "right" ? "accent" : "ink");
      return alpha || faint() ? `color-mix(in srgb, ${base} ${alpha || 30}%, transparent)` : base;
    };
    const series = [{}];
    const bands = [];
    for (const line of position.all) {
      const at = series.length;
      series.push({ stroke: tone(line), width: line.run ? 1.25 : 2, dash: line.outcome === "wrong" ? [6, 4] : undefined, points: { show: false } });
      series.push({ stroke: "transparent", width: 0, points: { show: false } }, { stroke: "transparent", width: 0, points: { show: false } });
      if (!line.run) bands.push({ series: [at + 2, at + 1], fill: tone(line, 11) });
    }
    series.push({ stroke: () => ink("accent"), width: 2, points: { show: false }, spanGaps: true });
    series.push({ stroke: () => ink("ink"), width: 2, dash: [6, 4], points: { show: false }, spanGaps: true });
    const values = position.all.flatMap((line) => [...line.low, ...line.high, ...line.mean]).filter((v) => v !== null);
    const low = Math.min(1, ...values);
    const high = Math.max(1, ...values);
    const room = Math.max(0.02, (high - low) * 0.14);
    return {
      height: 236,
      padding: [10, 26, 0, 0],
      scales: {
        x: { time: false, range: [0, 100] },
        y: { range: (u, a, b) => [Math.min(low - room, a ?? low), Math.max(high + room, b ?? high)] },
      },
      axes: [
        axis({ size: 26, grid: { show: false }, splits: [0, 25, 50, 75, 100], values: () => ["start", "25 %", "50 %", "75 %", "answer"] }),
        axis({ size: 44, space: 40, values: (u, splits) => splits.map((v) => number(v)) }),
      ],
      series,
      bands,
      cursor: { drag: { x: false, y: false }, y: false, points: { show: false } },
      hooks: {
        drawAxes: [
          (u) => {
            // A weight of 1 is plain GRPO.
            const y = Math.round(u.valToPos(1, "y", true));
            u.ctx.save();
            u.ctx.fillStyle = ink("ink-3");
            u.ctx.fillRect(u.bbox.left, y, u.bbox.width, devicePixelRatio || 1);
            u.ctx.restore();
          },
        ],
      },
    };
  }

  function showScrub() {
    const position = found();
    const chosen = Number($("scrub").value);
    $("scrub-value").textContent = chosen ? `step ${position.steps[chosen - 1]}` : "all steps";
    $("scrub").setAttribute("aria-valuetext", $("scrub-value").textContent);
    profilePlot.setData(profileData(position, chosen));
    const said = (outcome, values) => {
      const known = (values ?? []).filter((v) => v !== null);
      if (!known.length) return "";
      return `${outcome || "not judged"}: ${number(known[0])} at the start, ${number(known[Math.floor(known.length / 2)])} in the middle, ${number(known.at(-1))} before the answer`;
    };
    const lines = chosen
      ? ["right", "wrong"].map((outcome) => said(outcome, position.heat[outcome][chosen - 1]))
      : position.all.map((line) => said(line.outcome, line.mean));
    $("profile").setAttribute("aria-label", `Mean weight by place, ${$("scrub-value").textContent}. ${lines.filter(Boolean).join("; ")}`);
  }
  $("scrub").addEventListener("input", showScrub);

  function drawHeat(position) {
    const outcomes = ["", "right", "wrong"].filter((o) => position.heat[o].some((means) => means.some((v) => v !== null)));
    if (!outcomes.includes(heatOutcome)) heatOutcome = outcomes[0] ?? "";
    segments($("heat-outcome"), "heat-outcome", outcomes.map((o) => [o, o || "all"]), heatOutcome, (o) => {
      heatOutcome = o;
      heatPlot.redraw(false);
      nameHeat();
    });
    const xs = position.steps;
    const limit = position.limit;
    const edges = (i) => [
      i ? (xs[i - 1] + xs[i]) / 2 : xs[0] - (xs[1] - xs[0]) / 2,
      i < xs.length - 1 ? (xs[i] + xs[i + 1]) / 2 : xs[i] + (xs[i] - xs[i - 1]) / 2,
    ];
    const nameHeat = () =>
      $("heat").setAttribute("aria-label", `Mean weight by training step (across) and place in the reasoning (upwards), ${heatOutcome || "all"} responses`);
    nameHeat();
    heatPlot = plot(
      $("heat"),
      {
        height: 236,
        padding: [10, 8, 0, 0],
        scales: { x: { time: false, range: [edges(0)[0], edges(xs.length - 1)[1]] }, y: { range: [0, 100] } },
        axes: [
          axis({ size: 26, space: 60, grid: { show: false }, incrs: STEPS }),
          axis({ size: 44, grid: { show: false }, splits: [0, 50, 100], values: () => ["start", "50 %", "answer"] }),
        ],
        series: [{}, { stroke: "transparent", points: { show: false } }],
        cursor: { drag: { x: false, y: false }, points: { show: false }, y: false, x: false },
        hooks: {
          drawAxes: [
            (u) => {
              u.ctx.save();
              xs.forEach((_, i) => {
                const [a, b] = edges(i);
                const left = Math.round(u.valToPos(a, "x", true));
                const right = Math.round(u.valToPos(b, "x", true));
                position.heat[heatOutcome][i].forEach((mean, k) => {
                  if (mean === null) return;
                  const top = Math.round(u.valToPos(((k + 1) * 100) / K, "y", true));
                  const bottom = Math.round(u.valToPos((k * 100) / K, "y", true));
                  u.ctx.fillStyle = colour(signedClass(clamp(Math.log(Math.max(mean, 1e-9)) / Math.log(limit), -1, 1)));
                  u.ctx.fillRect(left, top, right - left, bottom - top);
                });
              });
              u.ctx.restore();
            },
          ],
        },
      },
      [xs, xs.map(() => null)],
    );
    scaleBar($("heat-legend"), true, ratioTicks(limit), "mean weight");
  }

  Object.assign(r, { drawPosition });
});
