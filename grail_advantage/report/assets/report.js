"use strict";
// The page of a run. What comes from a model is only ever set as textContent.
(async () => {
  const $ = (id) => document.getElementById(id);
  const make = (tag, name, text) => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
  const loaded = new Promise((done) => {
    if (document.readyState !== "loading") done();
    else document.addEventListener("DOMContentLoaded", done, { once: true });
  });

  // ---------------------------------------------------------------------------------------------------------- data

  // Base 85 of Python's base64.b85encode with "/" for "<", as pack.py writes it.
  const DIGITS = new Uint8Array(128);
  [..."0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;/=>?@^_`{|}~"].forEach((c, i) => {
    DIGITS[c.charCodeAt(0)] = i;
  });

  function decode(text) {
    const rest = text.length % 5;
    const size = Math.floor(text.length / 5) * 4 + (rest ? rest - 1 : 0);
    const bytes = new Uint8Array(size + 4);
    for (let i = 0, o = 0; i < text.length; i += 5, o += 4) {
      let value = 0;
      for (let j = i; j < i + 5; j++) value = value * 85 + (j < text.length ? DIGITS[text.charCodeAt(j)] : 84);
      bytes[o] = value >>> 24;
      bytes[o + 1] = value >>> 16;
      bytes[o + 2] = value >>> 8;
      bytes[o + 3] = value;
    }
    return bytes.subarray(0, size);
  }

  async function unpacked(text) {
    const stream = new Blob([decode(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  const json = async (id) => JSON.parse(new TextDecoder().decode(await unpacked($(id).textContent)));

  if (typeof DecompressionStream === "undefined") {
    $("nothing").textContent = "This browser is too old for the report: it needs Chrome 103, Firefox 113, Safari 16.4 or newer.";
    $("nothing").hidden = false;
    $("bench").hidden = $("filters").hidden = true;
    return;
  }
  const index = await json("index");
  let vocabulary = null;

  const METHODS = index.methods;
  const rows = index.rows.step.map((_, i) => {
    const row = { i };
    for (const name of Object.keys(index.rows)) row[name] = index.rows[name][i];
    row.name = `${row.run ? "b." : ""}${row.step}${row.update ? "u" + row.update : ""}.${row.row}`;
    return row;
  });
  const byName = new Map(rows.map((row) => [row.name, row]));
  const groups = index.groups;
  for (const group of groups) group.rows = [];
  for (const row of rows) groups[row.group].rows.push(row);
  // Right ones first, then wrong ones, then those that were not judged.
  const RANK = { right: 0, wrong: 1 };
  for (const group of groups) group.rows.sort((a, b) => (RANK[a.outcome] ?? 2) - (RANK[b.outcome] ?? 2) || a.row - b.row);

  // Little-endian numbers whose bytes stand apart by significance.
  function joined(bytes, at, count, width) {
    const out = new Uint32Array(count);
    for (let plane = 0; plane < width; plane++) {
      const from = at + plane * count;
      for (let i = 0; i < count; i++) out[i] |= bytes[from + i] << (8 * plane);
    }
    return out;
  }

  const BACKWARD = { linear: (x) => x, root: (x) => x * x, log: Math.exp };
  const opened = new Map();

  async function rollout(i) {
    if (opened.has(i)) {
      const found = opened.get(i);
      opened.delete(i);
      opened.set(i, found);
      return found;
    }
    const promise = unpackRollout(i);
    opened.set(i, promise);
    if (opened.size > 64) opened.delete(opened.keys().next().value);
    return promise;
  }

  async function unpackRollout(i) {
    let block = $(`r${i}`);
    // A block that has only begun to arrive has no element after it.
    if (!block || !block.nextElementSibling) {
      await loaded;
      block = $(`r${i}`);
    }
    if (!vocabulary) vocabulary = json("vocabulary").then((table) => ({ ...table, special: new Set(table.special) }));
    const words = await vocabulary;
    const bytes = await unpacked(block.textContent);
    const size = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
    const n = head.n;
    let at = 4 + size;
    let ids;
    if (head.ids[0] === "plain") {
      ids = joined(bytes, at, n, 4);
      at += n * 4;
    } else {
      // Frequent tokens are a byte; others are the byte of their page of 256 and one of those that follow.
      const direct = head.ids[1];
      let second = at + n;
      ids = new Uint32Array(n);
      for (let t = 0; t < n; t++) ids[t] = bytes[at + t] < direct ? bytes[at + t] : direct + (bytes[at + t] - direct) * 256 + bytes[second++];
      at = second;
    }
    const mask = head.mask ? bytes.subarray(at, at + n) : null;
    if (head.mask) at += n;
    const columns = {};
    const codes = {};
    const floats = (count) => {
      at += count * 4;
      return new Float32Array(joined(bytes, at - count * 4, count, 4).buffer);
    };
    for (const [name, how] of Object.entries(head.columns)) {
      let values;
      if (how[0] === "constant") values = new Float32Array(n).fill(how[1]);
      else if (how[0] === "same") values = columns[how[1]];
      else if (how[0] === "product") values = columns.weight.map((w, t) => w * columns.base_advantage[t]);
      else if (how[0] === "exact") {
        values = floats(n);
      } else if (how[0] === "lookup") {
        const table = floats(how[2]);
        values = Float32Array.from(codes[how[1]], (code) => table[code]);
        const where = joined(bytes, at, how[3], 4);
        at += how[3] * 4;
        floats(how[3]).forEach((value, i) => (values[where[i]] = value));
      } else {
        const [, width, scale, special, low, step] = how;
        const own = joined(bytes, at, n, width);
        codes[name] = own;
        at += n * width;
        const back = BACKWARD[scale];
        values = new Float32Array(n);
        for (let t = 0; t < n; t++) values[t] = own[t] === 0 ? NaN : own[t] === 1 ? special : back(low + (own[t] - 2) * step);
      }
      columns[name] = values;
    }
    return { n, ids, mask, columns, words };
  }

  // ---------------------------------------------------------------------------------------------------------- words

  const MINUS = "\u2212";
  function number(value, digits = 3) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : MINUS + "∞";
    const size = Math.abs(value);
    let text;
    if (size === 0) text = "0";
    else if (size >= 1e6 || size < 1e-4) text = size.toExponential(digits - 1).replace("e+", "e").replace("e-", "e" + MINUS);
    else if (size >= 1000) text = Math.round(size).toLocaleString("en-US").replace(/,/g, "\u202f");
    else text = String(Number(size.toPrecision(digits)));
    return (value < 0 ? MINUS : "") + text;
  }
  const plural = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;

  // Characters that show nothing or move others: control, format (bidi, zero width, tags), half a surrogate pair, odd blanks.
  const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0]/u;
  const UNSEEN_ALL = new RegExp(UNSEEN.source, "gu");
  const code = (c) => "U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");

  // Text with its unseen characters named, into an element.
  function visible(element, text, breaks = true) {
    if (!UNSEEN.test(text)) {
      element.textContent = text;
      return;
    }
    let rest = 0;
    element.textContent = "";
    const flush = (end) => end > rest && element.append(text.slice(rest, end));
    for (const match of text.matchAll(UNSEEN_ALL)) {
      const c = match[0];
      if (!breaks && c === "\n") continue;
      flush(match.index);
      rest = match.index + c.length;
      if (c === "\n") element.append(make("span", "sign soft", "↵"), "\n");
      else if (c === "\t") element.append(make("span", "sign soft", "→"), "\t");
      else element.append(make("span", "sign", code(c)));
    }
    flush(text.length);
  }
  const plain = (text) =>
    text.replace(UNSEEN_ALL, (c) => (c === "\n" ? "↵" : c === "\t" ? "⇥" : code(c))).replace(/^ | $/g, "␣");

  const spoken = (text) => (/\S/.test(text) ? plain(text) : text.includes("\n") ? "line break" : text.includes("\t") ? "tab" : text === "" ? "no text" : "space");

  const OUTCOME = { right: ["✓", "right"], wrong: ["✕", "wrong"] };
  function glyph(outcome) {
    const [sign, word] = OUTCOME[outcome] ?? ["·", "not judged"];
    const element = make("span", `glyph ${outcome ?? ""}`);
    const drawn = make("span", "", sign);
    drawn.setAttribute("aria-hidden", "true");
    element.append(drawn, make("span", "unseen", word));
    return element;
  }

  // --------------------------------------------------------------------------------------------------------- colours

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
    if (!known.length) return { place: () => 0, low: NaN, high: NaN };
    const positive = known.find((x) => x > 0);
    const high = known[Math.floor((known.length - 1) * 0.99)];
    const log = known[0] >= 0 && positive !== undefined && high / positive > 100;
    const low = log ? Math.max(positive, high * 1e-4) : known[Math.floor((known.length - 1) * 0.01)];
    const map = log ? (x) => Math.log(Math.max(x, low) / low) / Math.log(high / low) : (x) => (x - low) / (high - low || 1);
    return { place: (x) => clamp(map(x), 0, 1), low, high, log };
  }

  function column(data, overlay) {
    return columnOf(data, overlay, state.method);
  }
  // A method's own column where several were compared, else the plain one.
  function columnOf(data, overlay, method) {
    if (METHODS.length > 1 && overlay === "advantage") {
      const weight = data.columns[`weight:${method}`];
      const base = data.columns.base_advantage;
      return weight && base && weight.map((w, t) => w * base[t]);
    }
    const own = METHODS.length > 1 && (overlay === "weight" || overlay === "score");
    return data.columns[own ? `${overlay}:${method}` : overlay];
  }

  // Places of a rollout's tokens on the scale of an overlay, NaN where there is no value; and the scale.
  function places(data, overlay, values = column(data, overlay)) {
    const how = OVERLAYS[overlay];
    const scale = overlay === "score" && values ? scoreScale(values) : how;
    const out = new Float32Array(data.n).fill(NaN);
    if (values) for (let t = 0; t < data.n; t++) if (!Number.isNaN(values[t])) out[t] = scale.place(values[t]);
    return { places: out, scale };
  }
  const className = (overlay, p) => (Number.isNaN(p) ? "none" : OVERLAYS[overlay].signed ? signedClass(p) : shareClass(p));

  function scaleBar(host, signed, ticks, note) {
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
    host.append(scale);
    if (note) host.append(make("span", "", note));
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
      const page = pages.find((p) => p.row.i === state.row) ?? pages[0];
      const { low, high, log } = page?.scale ?? {};
      const ends = state.view === "side" || low === undefined ? ["low", "high"] : [number(low, 2), number(high, 2)];
      scaleBar(host, false, [[0, ends[0]], [1, ends[1]]], `each response's own${log ? ", log" : ""}`);
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
    const found = places(data, overlay, values);
    const end = Math.max(2, Math.round(canvas.width * share));
    const across = Math.min(end, Math.max(1, data.n));
    const bottom = canvas.height - Math.round(3 * dense);
    for (let x = 0; x < across; x++) {
      const from = Math.floor((x * data.n) / across);
      const to = Math.max(from + 1, Math.floor(((x + 1) * data.n) / across));
      let sum = 0;
      let count = 0;
      for (let t = from; t < to && t < data.n; t++) {
        if (Number.isNaN(found.places[t])) continue;
        sum += found.places[t];
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
    return end;
  }

  // ----------------------------------------------------------------------------------------------------------- state

  const DEFAULTS = { run: "", step: "", outcome: "", answer: "", least: "", most: "", sort: "", overlay: "weight", method: METHODS[0] ?? "", view: "one" };
  const state = { ...DEFAULTS, row: -1, token: -1 };
  function readHash() {
    const given = new URLSearchParams(location.hash.slice(1));
    Object.assign(state, DEFAULTS);
    for (const name of Object.keys(DEFAULTS)) if (given.has(name)) state[name] = given.get(name);
    if (!OVERLAYS[state.overlay] || !index.overlays.includes(state.overlay)) state.overlay = "weight";
    if (!METHODS.includes(state.method)) state.method = METHODS[0] ?? "";
    if (state.view !== "side") state.view = "one";
    state.token = given.has("token") ? Number(given.get("token")) : -1;
    const named = byName.get(given.get("rollout"));
    return named ? named.i : -1;
  }
  let written = "";
  function writeHash() {
    const out = new URLSearchParams();
    for (const name of Object.keys(DEFAULTS)) if (state[name] !== DEFAULTS[name]) out.set(name, state[name]);
    if (state.row >= 0) out.set("rollout", rows[state.row].name);
    if (state.token >= 0) out.set("token", state.token);
    written = `#${out}`;
    if (location.hash !== written) history.replaceState(null, "", written);
  }

  function segments(host, name, options, value, changed) {
    host.textContent = "";
    for (const [key, text] of options) {
      const label = make("label");
      const input = make("input");
      input.type = "radio";
      input.name = name;
      input.value = key;
      input.checked = key === value;
      input.addEventListener("change", () => changed(key));
      label.append(input, make("span", "", text));
      host.append(label);
    }
  }
  const check = (host, value) => host.querySelectorAll("input").forEach((input) => (input.checked = input.value === value));

  // ---------------------------------------------------------------------------------------------------------- curves

  const plots = [];
  const LINES = ["accent", "ink", "ink-3", "line-2"];
  const narrow = matchMedia("(max-width: 760px)");
  const touch = matchMedia("(hover: none)");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const FONT = "11px Inter, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
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
  const steps = [...new Set(rows.filter((r) => !r.run).map((r) => r.step))].sort((a, b) => a - b);
  const allSteps = [...new Set(rows.map((r) => r.step))].sort((a, b) => a - b);

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
        const entry = make("span", "");
        const dash = make("i");
        dash.style.borderColor = `var(--${LINES[i % LINES.length]})`;
        const value = make("b");
        entry.append(dash, `${label} `, value);
        key.append(entry);
        values.push(value);
      }
      key.classList.add("left");
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
        axes: [axis({ size: 24, space: 60, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000] }), axis({ size: 44, space: 34, values: (u, splits) => splits.map((v) => number(v)) })],
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
        chooseStep(String(near));
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

  // -------------------------------------------------------------------------------------------------------- position

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
      const entry = make("span", `${line.outcome || "other"}${line.run ? " other" : ""}`);
      const name = line.outcome ? `${line.outcome} (${number(line.rows)})` : `not judged (${number(line.rows)})`;
      entry.append(make("i"), line.run ? `${index.runs[line.run].name}, ${name}` : name);
      $("profile-key").append(entry);
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
        const button = make("button", "small-plot");
        button.type = "button";
        const host = make("span", "plot");
        button.append(make("span", "name", method), host);
        button.addEventListener("click", () => setMethod(method));
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
          axis({ size: 26, space: 60, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000] }),
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

  // ------------------------------------------------------------------------------------------------------------ list

  const HEIGHT = 56;
  let shown = [];
  const list = $("list");
  const inner = $("list-inner");
  const items = new Map();

  function choose() {
    const least = state.least === "" ? 0 : Number(state.least) || 0;
    const most = state.most === "" ? Infinity : Number(state.most) || Infinity;
    shown = rows.filter(
      (row) =>
        (state.run === "" || row.run === Number(state.run)) &&
        (state.step === "" || row.step === Number(state.step)) &&
        (state.outcome === "" || row.outcome === state.outcome) &&
        (state.answer === "" || (row.answer !== null || row.span !== null) === (state.answer === "yes")) &&
        row.length >= least &&
        row.length <= most,
    );
    if (state.sort === "spread") shown.sort((a, b) => (b.spread ?? -1) - (a.spread ?? -1));
    if (state.sort === "length") shown.sort((a, b) => b.length - a.length);
    if (state.sort === "shortest") shown.sort((a, b) => a.length - b.length);
    inner.style.height = `${shown.length * HEIGHT}px`;
    items.forEach((item) => item.remove());
    items.clear();
    const all = shown.length === rows.length;
    $("count").textContent = shown.length
      ? all ? plural(rows.length, "rollout") : `${number(shown.length)} of ${plural(rows.length, "rollout")}`
      : "No rollout is like this; change the choice below";
    drawList();
  }

  const widest = Math.max(1e-9, ...rows.map((row) => row.spread ?? 0));
  function item(place) {
    const row = shown[place];
    const element = make("div", "item");
    element.setAttribute("role", "option");
    element.setAttribute("aria-setsize", shown.length);
    element.setAttribute("aria-posinset", place + 1);
    element.dataset.place = place;
    element.style.transform = `translateY(${place * HEIGHT}px)`;
    const text = make("span", `text${row.answer === null ? " none" : ""}`);
    visible(text, row.answer === null ? "no answer" : row.answer.slice(0, 200), false);
    // A row without scores has no spread to show.
    const state_ = row.truncated ? "truncated" : row.neutral ? "neutral" : "";
    const spread = make("span", state_ ? "side" : "spread", state_);
    if (!state_) {
      const filled = make("i");
      filled.style.width = `${((row.spread ?? 0) / widest) * 100}%`;
      spread.append(filled);
      spread.title = `spread of weights ${number(row.spread)}`;
    }
    const run = index.runs.length > 1 ? `${index.runs[row.run].name} · ` : "";
    const step = allSteps.length > 1 ? `step ${row.step} · ` : "";
    const under = make("span", "under");
    const group = groups[row.group];
    visible(under, `${run}${step}problem ${index.problems[group.problem].id?.slice(0, 40) ?? group.place + 1}`, false);
    const side = make("span", "side", plural(row.length, "token"));
    element.append(glyph(row.outcome), text, side, under, spread);
    return element;
  }

  function drawList() {
    const from = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 6);
    const to = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / HEIGHT) + 6);
    const wanted = new Set();
    for (let place = from; place < to; place++) wanted.add(place);
    const current = shown.findIndex((row) => row.i === state.row);
    if (current >= 0) wanted.add(current);
    else if (shown.length) wanted.add(0);
    for (const [place, element] of items) {
      if (wanted.has(place)) continue;
      element.remove();
      items.delete(place);
    }
    for (const place of wanted) {
      if (!items.has(place)) {
        const made = item(place);
        items.set(place, made);
        inner.append(made);
      }
      const element = items.get(place);
      const on = place === current;
      element.setAttribute("aria-selected", on);
      element.tabIndex = on || (current < 0 && place === 0) ? 0 : -1;
    }
  }

  function reveal(place) {
    const top = place * HEIGHT;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + HEIGHT - list.clientHeight;
  }
  let waiting = 0;
  list.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = requestAnimationFrame(() => {
      waiting = 0;
      drawList();
    });
  }, { passive: true });
  list.addEventListener("click", (event) => {
    const element = event.target.closest(".item");
    if (!element) return;
    open(shown[Number(element.dataset.place)].i);
    items.get(Number(element.dataset.place))?.focus({ preventScroll: true });
    if (narrow.matches) $("reader").scrollIntoView();
  });
  list.addEventListener("keydown", (event) => {
    const element = event.target.closest(".item");
    if (!element || event.ctrlKey || event.metaKey || event.altKey) return;
    const place = Number(element.dataset.place);
    const page = Math.max(1, Math.floor(list.clientHeight / HEIGHT) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      event.preventDefault();
      const next = clamp(place + moves[event.key], 0, shown.length - 1);
      open(shown[next].i);
      reveal(next);
      drawList();
      items.get(next).focus({ preventScroll: true });
    } else if (event.key === "Enter" || event.key === "ArrowRight") {
      event.preventDefault();
      (document.querySelector(".tokens [tabindex='0']") ?? $("pages")).focus();
    }
  });

  // ---------------------------------------------------------------------------------------------------------- reader

  let pages = [];
  let turn = 0;
  let strips = [];
  let shownGroup = -1;

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
    if (group !== shownGroup) drawProblem(group);
    shownGroup = group;
    markStrips();
  }

  // Groups of the other run that answer the same problem, the nearest step first.
  function companions(group) {
    const same = groups.filter((other) => other.run !== group.run && other.problem === group.problem);
    return same.sort((a, b) => Math.abs(a.step - group.step) - Math.abs(b.step - group.step)).slice(0, 1);
  }
  // Right and wrong in turns, so that both are in sight.
  function together(group) {
    const all = [group, ...companions(group)].sort((a, b) => a.run - b.run).flatMap((g) => g.rows);
    const right = all.filter((row) => row.outcome === "right");
    const others = all.filter((row) => row.outcome !== "right");
    const out = [];
    for (let i = 0; i < Math.max(right.length, others.length); i++) out.push(...right.slice(i, i + 1), ...others.slice(i, i + 1));
    return out;
  }

  function drawProblem(number_) {
    const group = groups[number_];
    const problem = index.problems[group.problem];
    const host = $("problem");
    host.textContent = "";
    const prompt = make("div", "prompt");
    prompt.tabIndex = 0;
    prompt.setAttribute("role", "region");
    prompt.setAttribute("aria-label", "Prompt");
    visible(prompt, problem.prompt.trim() || "(no prompt in the dump)", false);
    host.append(prompt);
    if (problem.gold !== null) {
      const gold = make("p", "gold", "Right answer ");
      const value = make("b");
      visible(value, problem.gold);
      gold.append(value);
      if (problem.id !== null) {
        gold.append(" · ");
        const id = make("span");
        visible(id, problem.id);
        gold.append(id);
      }
      host.append(gold);
    }
    strips = [];
    for (const one of [group, ...companions(group)].sort((a, b) => a.run - b.run)) {
      const right = one.rows.filter((r) => r.outcome === "right").length;
      const wrong = one.rows.filter((r) => r.outcome === "wrong").length;
      const box = make("div", "strips");
      const counts = [right ? `${right} right` : "", wrong ? `${wrong} wrong` : ""].filter(Boolean).join(", ");
      const where = [index.runs.length > 1 ? index.runs[one.run].name : "", allSteps.length > 1 ? `step ${one.step}` : ""].filter(Boolean).join(", ");
      const kept = one.total > one.rows.length ? ` of ${one.total}` : "";
      box.append(make("h3", "", `${where ? where[0].toUpperCase() + where.slice(1) + ": " : ""}${one.rows.length}${kept} ${one.rows.length === 1 ? "response" : "responses"} to this problem${counts ? `, ${counts}` : ""}`));
      for (const row of one.rows) {
        const button = make("button", "strip");
        button.type = "button";
        const canvas = make("canvas");
        canvas.setAttribute("aria-hidden", "true");
        const meta = make("span", "meta");
        const answer = make("span");
        visible(answer, row.answer === null ? "no answer" : row.answer.slice(0, 40));
        meta.append(answer, ` · ${plural(row.length, "token")}`);
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
    const marks = [];
    if (strips.some(({ row }) => row.span)) marks.push(["accent", "answer"]);
    if (strips.some(({ row }) => row.wrong_step)) marks.push(["ink", "wrong step"]);
    for (const [tone, text] of marks) {
      const entry = make("span");
      const dash = make("i");
      dash.style.borderColor = `var(--${tone})`;
      entry.append(dash, text);
      key.append(entry);
    }
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
    const [sign, word] = OUTCOME[row.outcome] ?? ["", "not judged"];
    host.append(make("strong", row.outcome ?? "", `${sign} ${word[0].toUpperCase()}${word.slice(1)}`.trim()));
    const fact = (name, text, mono) => {
      const element = make("span", "", `${name} `);
      const value = make(mono ? "code" : "span");
      visible(value, text);
      element.append(value);
      host.append(element);
    };
    if (row.answer !== null) fact("answer", row.answer.slice(0, 300), true);
    if (allSteps.length > 1) fact("step", String(row.step));
    if (index.runs.length > 1) fact("of", index.runs[row.run].name);
    fact("tokens", number(row.length));
    if (row.reward !== null) fact("reward", number(row.reward));
    if (row.advantage !== null) fact("advantage", number(row.advantage));
    if (row.spread !== null) fact("spread of weights", number(row.spread));
    const neutral = row.neutrals ? row.neutrals[state.method] : row.neutral;
    if (row.truncated) host.append(make("span", "badge", "truncated: cut at the length limit"));
    if (neutral) host.append(make("span", "badge", `neutral: ${neutral}`));
    if (row.wrong_step) host.append(make("span", "badge", "wrong step: wavy line"));
    return host;
  }

  async function drawPages(mine) {
    const host = $("pages");
    const chosen = state.view === "side" ? together(groups[rows[state.row].group]) : [rows[state.row]];
    host.className = state.view === "side" ? "pages side" : "pages";
    if (state.view === "side") {
      host.tabIndex = 0;
      host.setAttribute("role", "region");
      host.setAttribute("aria-label", "Responses side by side");
    } else ["tabindex", "role", "aria-label"].forEach((name) => host.removeAttribute(name));
    if (state.view === "one") {
      const data = await rollout(chosen[0].i);
      if (mine !== turn) return;
      const page = makePage(chosen[0]);
      host.replaceChildren(page.element);
      pages = [page];
      fillPage(page, data);
    } else {
      pages = chosen.map(makePage);
      host.replaceChildren(...pages.map((page) => page.element));
      const watcher = new IntersectionObserver(
        (entries) => {
          for (const entry of entries) {
            if (!entry.isIntersecting) continue;
            watcher.unobserve(entry.target);
            const page = pages.find((p) => p.element === entry.target);
            if (page) rollout(page.row.i).then((data) => pages.includes(page) && (fillPage(page, data), markPages()));
          }
        },
        { rootMargin: "1500px 200px" },
      );
      pages.forEach((page) => watcher.observe(page.element));
    }
    markPages();
  }

  function makePage(row) {
    const element = make("article", `page ${row.outcome ?? ""}`);
    element.setAttribute("aria-label", `Response ${row.row}, step ${row.step}, ${row.outcome ?? "not judged"}`);
    element.append(facts(row));
    return { row, element, spans: null, data: null };
  }

  function fillPage(page, data) {
    const { row, element } = page;
    page.data = data;
    if (METHODS.length > 1) {
      page.strips = METHODS.map((method) => {
        const button = make("button", "strip");
        button.type = "button";
        const canvas = make("canvas");
        canvas.setAttribute("aria-hidden", "true");
        const neutral = row.neutrals?.[method];
        button.append(make("span", "glyph", method), canvas, make("span", "meta", neutral ? "neutral" : ""));
        button.setAttribute("aria-label", `Show ${method}${neutral ? `, neutral: ${neutral}` : ""}`);
        button.addEventListener("click", () => setMethod(method));
        return { method, button, canvas };
      });
      const box = make("div", "strips methods");
      box.append(make("h3", "", "The same response under each method"), ...page.strips.map((s) => s.button));
      element.append(box);
      box.style.margin = "0 0 14px";
    } else if (state.view === "one" && row.length > 200) {
      page.map = make("canvas", "minimap");
      page.map.setAttribute("aria-hidden", "true");
      page.map.title = "Click to go there";
      page.map.addEventListener("click", (event) => {
        const t = clamp(Math.floor((event.offsetX / page.map.clientWidth) * data.n), 0, data.n - 1);
        page.spans[t].scrollIntoView({ block: "center" });
        point(page, t, false);
      });
      element.append(page.map);
    }
    const box = make("div", "tokens");
    box.setAttribute("role", "listbox");
    box.setAttribute("aria-orientation", "horizontal");
    box.setAttribute("aria-label", `Tokens of response ${row.row}, ${data.n} of them; arrow keys move between them`);
    page.spans = new Array(data.n);
    let line = null;
    for (let t = 0; t < data.n; t++) {
      if (!line) {
        line = make("div", "line");
        line.setAttribute("role", "presentation");
        box.append(line);
      }
      const span = make("span");
      const text = data.words.texts[data.ids[t]];
      if (text === "") span.append(make("span", "sign soft", "◌"));
      else if (data.words.special.has(data.ids[t])) visible(span.appendChild(make("span", "sign")), text);
      else visible(span, text);
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", "false");
      if (!/\S/.test(text)) span.setAttribute("aria-label", spoken(text));
      page.spans[t] = span;
      line.append(span);
      if (text.includes("\n")) line = null;
    }
    page.places = new Map(page.spans.map((span, t) => [span, t]));
    paint(page);
    if (data.n) page.spans[0].tabIndex = 0;
    page.element.append(box);
    box.addEventListener("pointerover", (event) => {
      const t = page.places.get(event.target.closest(".t"));
      if (t !== undefined) readOut(page, t);
    });
    box.addEventListener("pointerleave", () => readOut(page.pointed === undefined ? null : page, page.pointed));
    box.addEventListener("click", (event) => {
      const t = page.places.get(event.target.closest(".t"));
      if (t !== undefined) point(page, t, true);
    });
    box.addEventListener("focusin", (event) => {
      const t = page.places.get(event.target);
      if (t !== undefined && page.pointed !== t) point(page, t, false);
    });
    box.addEventListener("keydown", (event) => move(page, event));
    drawPageStrips(page);
    if (page.row.i === state.row && state.token >= 0 && state.token < data.n) {
      point(page, state.token, false);
      page.spans[state.token].scrollIntoView({ block: "center" });
    }
  }

  function paint(page) {
    const { row, data } = page;
    const { places: found_, scale } = places(data, state.overlay);
    page.scale = scale;
    for (let t = 0; t < data.n; t++) {
      let name = `t ${className(state.overlay, found_[t])}`;
      if (data.mask && !data.mask[t]) name += " off";
      if (row.span && t >= row.span[0] && t < row.span[3]) name += " span";
      if (row.wrong_step && t >= row.wrong_step[0] && t < row.wrong_step[1]) name += " wrong-step";
      if (t === page.pointed) name += " at";
      page.spans[t].className = name;
    }
  }
  function drawPageStrips(page) {
    if (!page.data) return;
    if (page.map) drawStrip(page.map, page.row, page.data, state.overlay, 1);
    for (const { method, button, canvas } of page.strips ?? []) {
      const overlay = state.overlay === "score" ? "score" : "weight";
      drawStrip(canvas, page.row, page.data, overlay, 1, columnOf(page.data, overlay, method) ?? new Float32Array(page.data.n).fill(NaN));
      button.setAttribute("aria-pressed", method === state.method);
    }
  }
  function markPages() {
    drawLegend();
    if (state.token < 0) readOut(null);
  }

  // The token that keyboard and tap point at.
  function point(page, t, focus) {
    for (const other of pages) {
      if (other.pointed === undefined || !other.spans) continue;
      other.spans[other.pointed].classList.remove("at");
      other.spans[other.pointed].setAttribute("aria-selected", "false");
      if (other === page) other.spans[other.pointed].tabIndex = -1;
      if (other !== page) other.pointed = undefined;
    }
    if (page.spans[0]) page.spans[0].tabIndex = -1;
    page.pointed = t;
    const span = page.spans[t];
    span.tabIndex = 0;
    span.classList.add("at");
    span.setAttribute("aria-selected", "true");
    span.setAttribute("aria-label", describe(page, t));
    if (focus) span.focus({ preventScroll: true });
    if (state.row !== page.row.i) {
      state.row = page.row.i;
      drawList();
      markStrips();
    }
    state.token = t;
    writeHash();
    readOut(page, t);
  }

  function move(page, event) {
    if (event.ctrlKey || event.metaKey || event.altKey || page.pointed === undefined) return;
    const from = page.pointed;
    const last = page.spans.length - 1;
    let to = null;
    if (event.key === "ArrowRight") to = Math.min(last, from + 1);
    else if (event.key === "ArrowLeft") to = Math.max(0, from - 1);
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = last;
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") to = otherLine(page, from, event.key === "ArrowDown" ? 1 : -1);
    else if (event.key === "Escape") {
      event.preventDefault();
      drawList();
      const current = shown.findIndex((row) => row.i === state.row);
      items.get(Math.max(0, current))?.focus();
      return;
    }
    if (to === null) return;
    event.preventDefault();
    point(page, to, true);
    const box = page.spans[to].getBoundingClientRect();
    const top = $("toolbar").getBoundingClientRect().bottom;
    const bottom = $("readout").getBoundingClientRect().top;
    if (box.top < Math.max(0, top) + 8 || box.bottom > bottom - 8) page.spans[to].scrollIntoView({ block: "center", behavior: "instant" });
  }

  // The token above or below: the first line that differs, the place in it nearest to where the moves up and down began.
  function otherLine(page, from, direction) {
    const start = page.spans[from].getClientRects()[0];
    if (!start) return from;
    if (page.aim?.token !== from) page.aim = { middle: start.left + start.width / 2 };
    const middle = page.aim.middle;
    let best = from;
    let line = null;
    for (let t = from + direction; t >= 0 && t < page.spans.length; t += direction) {
      const box = page.spans[t].getClientRects()[0];
      if (!box || Math.abs(box.top - start.top) < 6) continue;
      line ??= { top: box.top, distance: Infinity };
      if (Math.abs(box.top - line.top) >= 6) break;
      const distance = Math.abs(box.left + box.width / 2 - middle);
      if (distance < line.distance) {
        line.distance = distance;
        best = t;
      }
    }
    page.aim.token = best;
    return best;
  }

  const FIELDS = [
    ["weight", "Weight"], ["score", "Score"], ["base_advantage", "Base advantage"], ["advantage", "Advantage"], ["surprisal", "Surprisal"], ["entropy", "Entropy"],
  ];
  function notes(page, t) {
    const { row, data } = page;
    const said = [];
    if (row.span && t >= row.span[1] && t < row.span[2]) said.push("in the answer");
    else if (row.span && t >= row.span[0] && t < row.span[3]) said.push("bounds the answer");
    else if (row.span && t >= row.span[3]) said.push("behind the answer");
    if (row.wrong_step && t >= row.wrong_step[0] && t < row.wrong_step[1]) said.push("in the wrong step");
    if (data.mask && !data.mask[t]) said.push("does not train");
    return said;
  }
  const tokenText = (data, t) => data.words.texts[data.ids[t]] || "part of a character";
  function describe(page, t) {
    const { data } = page;
    const values = FIELDS.filter(([name]) => column(data, name)).map(([name, text]) => `${text.toLowerCase()} ${number(column(data, name)[t])}`);
    return [spoken(tokenText(data, t)), `token ${t + 1} of ${data.n}`, ...values, ...notes(page, t)].join(", ");
  }
  function readOut(page, t) {
    const host = $("readout");
    if (!page || t === undefined || !page.data) {
      if (pages.length) {
        host.hidden = false;
        host.className = "readout idle";
        host.replaceChildren(make("span", "quiet", touch.matches ? "Tap a token to read its values." : "Point at a token to read its values. Arrow keys move between tokens, Escape goes back to the list."));
      } else host.hidden = true;
      return;
    }
    const { data } = page;
    host.hidden = false;
    host.className = "readout";
    const what = make("div", "what");
    what.append(plain(tokenText(data, t)).slice(0, 60), make("small", "", `${number(t + 1)} of ${number(data.n)} · id ${data.words.ids[data.ids[t]]}`));
    const values = make("dl");
    for (const [name, text] of FIELDS) {
      const known = column(data, name);
      if (!known) continue;
      const field = make("div", name === state.overlay ? "on" : "");
      field.append(make("dt", "", text), make("dd", "", number(known[t])));
      if (name === "surprisal" && !Number.isNaN(known[t])) field.title = `probability ${number(Math.exp(-known[t]))}`;
      values.append(field);
    }
    const more = notes(page, t).join(" · ");
    host.replaceChildren(what, values);
    if (more) host.append(make("span", "more", more));
  }

  // ---------------------------------------------------------------------------------------------------------- choices

  const form = $("filters");
  function setForm() {
    for (const name of ["run", "step", "outcome", "answer", "least", "most", "sort"]) {
      form.elements[name].value = state[name];
      if (form.elements[name].value !== state[name]) form.elements[name].value = state[name] = "";
    }
    check($("overlay"), state.overlay);
    check($("view"), state.view);
    $("method").value = state.method;
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
    const current = shown.findIndex((row) => row.i === state.row);
    if (current >= 0) reveal(current);
    drawList();
    writeHash();
    plots.forEach((p) => p.redraw(false));
  }
  form.addEventListener("change", () => {
    for (const name of ["run", "step", "outcome", "answer", "sort", "least", "most"]) state[name] = form.elements[name].value.trim();
    refilter();
  });
  form.addEventListener("submit", (event) => event.preventDefault());

  // Of problems with right and wrong responses, the one with the widest weights: the first thing to look at.
  function telling(among) {
    const score = (row) => {
      const group = groups[row.group];
      const mixed = group.rows.some((r) => r.outcome === "right") && group.rows.some((r) => r.outcome === "wrong");
      return (mixed ? 1e6 : 0) + (row.neutral ? 0 : 1e4) + (row.wrong_step ? 1e3 : 0) + (row.spread ?? 0);
    };
    if (state.sort !== "") return among[0];
    if (among.some((row) => !row.run)) among = among.filter((row) => !row.run);
    const step = among.reduce((last, row) => Math.max(last, row.step), 0);
    return among.filter((row) => row.step === step).reduce((best, row) => (score(row) > score(best) ? row : best));
  }

  function setOverlay(overlay) {
    state.overlay = overlay;
    repaint();
    writeHash();
  }
  function setMethod(method) {
    state.method = method;
    $("method").value = method;
    drawPosition();
    pages.forEach((page) => page.element.replaceChild(facts(page.row), page.element.firstChild));
    repaint();
    writeHash();
  }
  function repaint() {
    for (const page of pages) if (page.data) paint(page), drawPageStrips(page);
    drawStrips();
    drawLegend();
    const at = pages.find((page) => page.pointed !== undefined);
    if (at) readOut(at, at.pointed);
  }

  function setUp() {
    const steps_ = form.elements.step;
    steps_.append(new Option("any", ""), ...allSteps.map((step) => new Option(step, step)));
    $("pick-step").hidden = allSteps.length < 2;
    form.elements.run.append(new Option("both", ""), ...index.runs.map((run, i) => new Option(run.name, i)));
    $("pick-run").hidden = index.runs.length < 2;
    segments($("overlay"), "overlay", index.overlays.map((name) => [name, OVERLAYS[name].name]), state.overlay, setOverlay);
    segments($("view"), "view", [["one", "One"], ["side", "Side by side"]], state.view, (view) => {
      state.view = view;
      state.token = -1;
      writeHash();
      drawPages(++turn);
    });
    $("method").append(...METHODS.map((name) => new Option(name, name)));
    $("method").addEventListener("change", () => setMethod($("method").value));
    $("pick-method").hidden = METHODS.length < 2;
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

  addEventListener("hashchange", () => {
    if (location.hash === written) return;
    const named = readHash();
    setForm();
    choose();
    shownGroup = -1;
    if (named >= 0) open(named, true);
    else if (shown.length) open(telling(shown).i);
    repaint();
  });
  dark.addEventListener("change", () => {
    palette = new Map();
    css = null;
    plots.forEach((p) => p.redraw(false));
    drawStrips();
    pages.forEach(drawPageStrips);
  });
  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => {
      drawList();
      drawStrips();
      pages.forEach(drawPageStrips);
    }, 120);
  });

  head();
  const named = readHash();
  drawTraining();
  drawPosition();
  if (!rows.length) {
    $("nothing").textContent = index.nothing;
    $("nothing").hidden = false;
    $("bench").hidden = form.hidden = true;
  } else {
    setUp();
    setForm();
    choose();
    const first = named >= 0 ? rows[named] : shown.length ? telling(shown) : null;
    if (first) {
      await open(first.i, named >= 0);
      const place = shown.indexOf(first);
      list.scrollTop = place * HEIGHT - list.clientHeight / 3;
      drawList();
    }
  }
  performance.mark("ready");
  document.documentElement.dataset.ready = "yes";
})();
