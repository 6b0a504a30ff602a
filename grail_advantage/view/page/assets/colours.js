// Colours of tokens and plots, their scales and legends.

const HALF = index.colours.half;
const STEPS = index.colours.steps;
const W = index.limits.weight;
const RATIOS = { 4: [[0, "≤¼"], [0.25, "½"], [0.5, "1"], [0.75, "2"], [1, "≥4"]], 2: [[0, "≤½"], [0.5, "1"], [1, "≥2"]] };
function linear(name, limit, signed = false) {
  const end = number(limit, 2);
  const ticks = signed ? [[0, number(-limit, 2)], [0.5, "0"], [1, end]] : [[0, "0"], [1, `${end}+`]];
  return { name, signed, place: (x) => clamp(x / limit, signed ? -1 : 0, 1), ticks, note: signed ? "" : "nats" };
}
// Each has the place of a value on its scale and the ticks of its legend; scores get a scale for each response.
const OVERLAYS = {
  weight: {
    name: "Weight",
    signed: true,
    place: (x) => (x > 0 ? clamp(Math.log(x) / Math.log(W), -1, 1) : -1),
    ticks: RATIOS[W] ?? [[0, `≤1/${W}`], [0.5, "1"], [1, `≥${W}`]],
  },
  score: { name: "Score", ticks: [[0, "low"], [1, "high"]], note: "each response's own" },
  advantage: linear("Advantage", index.limits.advantage, true),
  received: { ...linear("Received", index.limits.advantage, true), clipped: true },
  surprisal: linear("Surprisal", index.limits.surprisal),
  entropy: linear("Entropy", index.limits.entropy),
};
const palette = new Map();
function colour(name) {
  if (!palette.has(name)) {
    const probe = make("i", name);
    document.body.append(probe);
    palette.set(name, getComputedStyle(probe).backgroundColor);
    probe.remove();
  }
  return palette.get(name);
}
const css = getComputedStyle(document.documentElement);
const ink = (name) => css.getPropertyValue(`--${name}`).trim();

// Scores have no common scale: each response has its own, of the logarithm where they span a factor of 100.
function scoreScale(values) {
  const known = Array.from(values).filter((x) => !Number.isNaN(x)).sort((a, b) => a - b);
  if (!known.length) return () => 0;
  const positive = known.find((x) => x > 0);
  const high = known[Math.floor((known.length - 1) * 0.99)];
  const log = known[0] >= 0 && positive !== undefined && high / positive > 100;
  const low = log ? Math.max(positive, high * 1e-4) : known[Math.floor((known.length - 1) * 0.01)];
  const map = log ? (x) => Math.log(Math.max(x, low) / low) / Math.log(high / low) : (x) => (x - low) / (high - low || 1);
  return (x) => clamp(map(x), 0, 1);
}

// A column by the name of its overlay; of the chosen method where several gave the responses weights.
function column(data, overlay, method = state.method) {
  const known = data.columns;
  if (overlay === "received" && state.epoch !== "") return known[`received@${state.epoch}`] ?? (state.epoch === "1" ? known.received : undefined);
  if (!["weight", "score", "advantage"].includes(overlay)) return known[overlay];
  const own = known[`${overlay}:${method}`] ?? (METHODS.length > 1 ? undefined : known[overlay]);
  if (own || overlay !== "advantage") return own;
  const weight = column(data, "weight", method);
  return weight && known.base_advantage && weight.map((w, t) => w * known.base_advantage[t]);
}

// Whether the loss clipped a token in one of the shown optimiser steps.
function isClipped(data, t) {
  const known = data.columns;
  const own = state.epoch !== "" && known["received@1"] ? known[`clipped@${state.epoch}`] : known.clipped;
  return state.overlay === "received" && own?.[t] > 0;
}
// Places of a rollout's tokens on the scale of an overlay, NaN where there is no value.
function places(data, overlay, values = column(data, overlay)) {
  const how = OVERLAYS[overlay];
  const place = overlay === "score" && values ? scoreScale(values) : how.place;
  const out = new Float32Array(data.n).fill(NaN);
  // What does not train has a weight of 0 by definition, which is no colour.
  // What it received all the same, it shows.
  const shown = (t) => !Number.isNaN(values[t]) && (data.mask[t] || !how.signed || (overlay === "received" && values[t] !== 0));
  if (values) for (let t = 0; t < data.n; t++) if (shown(t)) out[t] = place(values[t]);
  return out;
}
// The class that the style sheet colours: d0 (low) to d(2 HALF) (high) around d(HALF), s0 to s(STEPS - 1).
function className(overlay, p) {
  if (Number.isNaN(p)) return "none";
  return OVERLAYS[overlay].signed ? `d${HALF + Math.round(p * HALF)}` : `s${Math.round(p * (STEPS - 1))}`;
}

function drawLegend() {
  const { name, signed, ticks, note, clipped } = OVERLAYS[state.overlay];
  const scale = make("div", "scale");
  const bar = make("div", "bar");
  const cells = signed ? 2 * HALF + 1 : STEPS;
  for (let i = 0; i < cells; i++) bar.append(make("i", signed ? `d${i}` : `s${i}`));
  scale.append(bar);
  for (const [place, text] of ticks) {
    const tick = make("span", `tick${place <= 0 ? " first" : place >= 1 ? " last" : ""}`, text);
    tick.style.left = `${place * 100}%`;
    scale.append(tick);
  }
  $("legend").replaceChildren(scale, make("span", "", note));
  if (clipped) {
    const key = make("span");
    key.append(make("i", "swatch clipped"), "clipped");
    $("legend").append(key);
  }
  $("legend").setAttribute("aria-label", `Colours of ${name.toLowerCase()}`);
}

// One line of colour for a whole response; `share` of the width is its length beside the longest.
function drawStrip(canvas, row, data, overlay, share, values) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width) return;
  const dense = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  const pen = canvas.getContext("2d");
  const shown = places(data, overlay, values);
  const end = Math.max(2, Math.round(canvas.width * share));
  const across = Math.min(end, Math.max(1, data.n));
  const bottom = canvas.height - Math.round(3 * dense);
  for (let x = 0; x < across; x++) {
    const from = Math.floor((x * data.n) / across);
    const to = Math.max(from + 1, Math.floor(((x + 1) * data.n) / across));
    let sum = 0;
    let count = 0;
    for (let t = from; t < to && t < data.n; t++) {
      if (Number.isNaN(shown[t])) continue;
      sum += shown[t];
      count++;
    }
    pen.fillStyle = colour(className(overlay, count ? sum / count : NaN));
    const left = Math.round((x * end) / across);
    pen.fillRect(left, 0, Math.round(((x + 1) * end) / across) - left, bottom);
  }
  pen.strokeStyle = ink("line-2");
  pen.lineWidth = dense;
  pen.strokeRect(dense / 2, dense / 2, end - dense, bottom - dense);
  const mark = (range, style) => {
    pen.fillStyle = style;
    const left = Math.round((range[0] / data.n) * end);
    pen.fillRect(left, bottom + dense, Math.max(2 * dense, Math.round((range[1] / data.n) * end) - left), 2 * dense);
  };
  if (row.span) mark([row.span[0], row.span[3]], ink("accent"));
  if (row.wrong_step) mark(row.wrong_step, ink("ink"));
}
