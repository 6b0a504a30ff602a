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

  const BACKWARD = { linear: (x) => x, root: (x) => x * x, log: Math.exp };
  const opened = new Map();

  async function rollout(i) {
    const promise = opened.get(i) ?? unpackRollout(i);
    opened.delete(i); // and to the end, as the one used last
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
    // Little-endian numbers whose bytes stand apart by significance.
    const take = (width) => {
      const out = new Uint32Array(n);
      for (let plane = 0; plane < width; plane++) for (let t = 0; t < n; t++) out[t] |= bytes[at++] << (8 * plane);
      return out;
    };
    const ids = take(4);
    const mask = take(1);
    const columns = {};
    for (const [name, how] of Object.entries(head.columns)) {
      if (how === "product") columns[name] = columns.weight.map((w, t) => w * columns.base_advantage[t]);
      else if (how === "exact") columns[name] = new Float32Array(take(4).buffer);
      else if (how[0] === "same") columns[name] = columns[how[1]];
      else {
        const [scale, special, low, step] = how;
        const value = (code) => (code === 0 ? NaN : code === 1 ? special : BACKWARD[scale](low + (code - 2) * step));
        columns[name] = Float32Array.from(take(1), value);
      }
    }
    return { n, ids, mask, columns, words };
  }

  Object.assign(r, { rollout, index: await json("index") });
});
