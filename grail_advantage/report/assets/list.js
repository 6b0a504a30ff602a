// The list of rollouts; only the entries in sight are elements.
parts.push((r) => {
  const { $, make, clamp, number, plural, visible, glyph, rows, groups, allSteps, narrow, state, index } = r;
  const HEIGHT = 56;
  r.shown = [];
  const list = $("list");
  const inner = $("list-inner");
  const items = new Map();

  function choose() {
    const least = state.least === "" ? 0 : Number(state.least) || 0;
    const most = state.most === "" ? Infinity : Number(state.most) || Infinity;
    r.shown = rows.filter(
      (row) =>
        (state.run === "" || row.run === Number(state.run)) &&
        (state.step === "" || row.step === Number(state.step)) &&
        (state.outcome === "" || row.outcome === state.outcome) &&
        (state.answer === "" || (row.answer !== null || row.span !== null) === (state.answer === "yes")) &&
        row.length >= least &&
        row.length <= most,
    );
    if (state.sort === "spread") r.shown.sort((a, b) => (b.spread ?? -1) - (a.spread ?? -1));
    if (state.sort === "length") r.shown.sort((a, b) => b.length - a.length);
    if (state.sort === "shortest") r.shown.sort((a, b) => a.length - b.length);
    inner.style.height = `${r.shown.length * HEIGHT}px`;
    items.forEach((item) => item.remove());
    items.clear();
    const all = r.shown.length === rows.length;
    $("count").textContent = r.shown.length
      ? all ? plural(rows.length, "rollout") : `${number(r.shown.length)} of ${plural(rows.length, "rollout")}`
      : "No rollout is like this; change the choice below";
    drawList();
  }

  const widest = Math.max(1e-9, ...rows.map((row) => row.spread ?? 0));
  function item(place) {
    const row = r.shown[place];
    const element = make("div", "item");
    element.setAttribute("role", "option");
    element.setAttribute("aria-setsize", r.shown.length);
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
    const to = Math.min(r.shown.length, Math.ceil((list.scrollTop + list.clientHeight) / HEIGHT) + 6);
    const wanted = new Set();
    for (let place = from; place < to; place++) wanted.add(place);
    const current = r.shown.findIndex((row) => row.i === state.row);
    if (current >= 0) wanted.add(current);
    else if (r.shown.length) wanted.add(0);
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
    r.open(r.shown[Number(element.dataset.place)].i);
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
      const next = clamp(place + moves[event.key], 0, r.shown.length - 1);
      r.open(r.shown[next].i);
      reveal(next);
      drawList();
      items.get(next).focus({ preventScroll: true });
    } else if (event.key === "Enter" || event.key === "ArrowRight") {
      event.preventDefault();
      (document.querySelector(".tokens [tabindex='0']") ?? $("pages")).focus();
    }
  });

  Object.assign(r, { drawList, items, HEIGHT, list, choose, reveal });
});
