// The data of the page: the index, and rollouts that are unpacked when they are looked at.
parts.push(async (r) => {
  const { $ } = r;
  const loaded = new Promise((done) => {
    if (document.readyState !== "loading") done();
    else document.addEventListener("DOMContentLoaded", done, { once: true });
  });

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

  let vocabulary = null;

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
    for (const [name, how] of Object.entries(head.columns)) {
      let values;
      if (how[0] === "constant") values = new Float32Array(n).fill(how[1]);
      else if (how[0] === "same") values = columns[how[1]];
      else if (how[0] === "product") values = columns.weight.map((w, t) => w * columns.base_advantage[t]);
      else if (how[0] === "exact") {
        values = new Float32Array(joined(bytes, at, n, 4).buffer);
        at += n * 4;
      } else {
        const [, width, scale, special, low, step] = how;
        const own = joined(bytes, at, n, width);
        at += n * width;
        const back = BACKWARD[scale];
        values = new Float32Array(n);
        for (let t = 0; t < n; t++) values[t] = own[t] === 0 ? NaN : own[t] === 1 ? special : back(low + (own[t] - 2) * step);
      }
      columns[name] = values;
    }
    return { n, ids, mask, columns, words };
  }

  Object.assign(r, { rollout, index: await json("index") });
});
