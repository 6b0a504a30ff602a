// The turns of a conversation: which there are, and a line with reward and advantage before each.

// Half-open ranges of the model's own tokens, between those that a tool or a user wrote.
function turnsOf(row, n) {
  const turns = [];
  let start = 0;
  for (const [from, to] of [...(row.tool ?? []), [n, n]]) {
    if (from > start) turns.push([start, from]);
    start = to;
  }
  return turns;
}
// The advantage of a turn, where all its trained tokens have the same one.
function turnAdvantage(data, [start, end]) {
  const known = column(data, "advantage");
  const values = known ? known.slice(start, end).filter((value, t) => data.mask[start + t]) : [];
  return values.length && values.every((value) => value === values[0]) ? values[0] : null;
}
function markTurns(page) {
  const { row, data } = page;
  if (!row.tool && !row.turn_rewards) return;
  turnsOf(row, data.n).forEach((range, k) => {
    const parts = [`turn ${k + 1}`];
    const reward = row.turn_rewards?.[k];
    const advantage = turnAdvantage(data, range);
    if (reward !== undefined) parts.push(`reward ${number(reward)}`);
    if (advantage !== null) parts.push(`advantage ${number(advantage)}`);
    page.spans[range[0]].before(make("span", "turn", parts.join(" · "), { "aria-hidden": true }));
  });
}
