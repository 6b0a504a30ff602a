// Colours of tokens and plots, their scales and legends.

const HALF = index.colours.half;
const STEPS = index.colours.steps;
const W = index.limits.weight;
const OVERLAYS = {
  weight: { name: "Weight", signed: true, place: (x) => (x > 0 ? clamp(Math.log(x) / Math.log(W), -1, 1) : -1) },
  score: { name: "Score" },
  advantage: { name: "Advantage", signed: true, place: (x) => clamp(x / index.limits.advantage, -1, 1) },
  surprisal: { name: "Surprisal", place: (x) => clamp(x / index.limits.surprisal, 0, 1) },
  entropy: { name: "Entropy", place: (x) => clamp(x / index.limits.entropy, 0, 1) },
};
// Names of the classes that the style sheet colours: d0 (low) to d(2 HALF) (high) around d(HALF), s0 to s(STEPS - 1).
const signedClass = (p) => `d${HALF + Math.round(p * HALF)}`;
const shareClass = (p) => `s${Math.round(p * (STEPS - 1))}`;
let palette = new Map();
function colour(name) {
  if (!palette.has(name)) {
    const probe = make("i", name);
    document.body.append(probe);
    palette.set(name, getComputedStyle(probe).backgroundColor);
    probe.remove();
  }
  return palette.get(name);
}
let css = null;
function ink(name) {
  css ??= getComputedStyle(document.documentElement);
  return css.getPropertyValue(`--${name}`).trim();
}

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

// A column by the name of its overlay; of the chosen method where several weighed the responses.
function column(data, overlay, method = state.method) {
  const known = data.columns;
  if (!["weight", "score", "advantage"].includes(overlay)) return known[overlay];
  const own = known[`${overlay}:${method}`] ?? (METHODS.length > 1 ? undefined : known[overlay]);
  if (own || overlay !== "advantage") return own;
  const weight = column(data, "weight", method);
  return weight && known.base_advantage && weight.map((w, t) => w * known.base_advantage[t]);
}

// Places of a rollout's tokens on the scale of an overlay, NaN where there is no value.
function places(data, overlay, values = column(data, overlay)) {
  const how = OVERLAYS[overlay];
  const place = overlay === "score" && values ? scoreScale(values) : how.place;
  const out = new Float32Array(data.n).fill(NaN);
  // What does not train has a weight of 0 by definition, which is no colour.
  const shown = (t) => !Number.isNaN(values[t]) && (data.mask[t] || !how.signed);
  if (values) for (let t = 0; t < data.n; t++) if (shown(t)) out[t] = place(values[t]);
  return out;
}
const className = (overlay, p) => (Number.isNaN(p) ? "none" : OVERLAYS[overlay].signed ? signedClass(p) : shareClass(p));

function scaleBar(host, signed, ticks, note = "") {
  host.textContent = "";
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
  host.append(scale, make("span", "", note));
}

// Ticks of a scale of ratios that ends at `limit`.
function ratioTicks(limit) {
  if (limit === 4) return [[0, "¼"], [0.25, "½"], [0.5, "1"], [0.75, "2"], [1, "4"]];
  if (limit === 2) return [[0, "½"], [0.5, "1"], [1, "2"]];
  return [[0, `1/${limit}`], [0.5, "1"], [1, String(limit)]];
}

function drawLegend() {
  const overlay = state.overlay;
  const l = index.limits;
  const host = $("legend");
  if (overlay === "weight") scaleBar(host, true, ratioTicks(W));
  else if (overlay === "advantage") scaleBar(host, true, [[0, number(-l.advantage, 2)], [0.5, "0"], [1, number(l.advantage, 2)]]);
  else if (overlay === "score") {
    scaleBar(host, false, [[0, "low"], [1, "high"]], "each response's own");
  } else scaleBar(host, false, [[0, "0"], [1, `${number(l[overlay], 2)}+`]], "nats");
  host.setAttribute("role", "img");
  host.setAttribute("aria-label", `Colours of ${OVERLAYS[overlay].name.toLowerCase()}`);
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
function forgetColours() {
  palette = new Map();
  css = null;
}
