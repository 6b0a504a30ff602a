// The data of the page: the index, and rollouts that are unpacked when they are looked at (pack.py describes a block).

if (typeof DecompressionStream === "undefined") {
  $("nothing").textContent = "This browser is too old for the report: it needs Chrome 103, Firefox 113, Safari 16.4 or newer.";
  $("nothing").hidden = false;
  $("bench").hidden = $("filters").hidden = true;
  throw new Error("no DecompressionStream");
}

async function unpack(id) {
  const bytes = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const index = JSON.parse(new TextDecoder().decode(await unpack("index")));

// A float16 from its 16 bits; Float16Array is newer than the browsers that the page supports.
function half(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return NaN;
  return (bits >> 15 ? -1 : 1) * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}

async function unpackRollout(i, all = true) {
  const buffer = await unpack(`r${i}`);
  let at = 4 + new DataView(buffer).getUint32(0, true);
  const { n, columns, ...words } = JSON.parse(new TextDecoder().decode(buffer.slice(4, at)));
  const take = (Kind) => new Kind(buffer.slice(at, (at += n * Kind.BYTES_PER_ELEMENT)));
  const data = { n, words: { ...words, special: new Set(words.special) }, ids: take(Uint32Array), mask: take(Uint8Array), columns: {} };
  for (const [name, exponent] of all ? Object.entries(columns) : []) {
    data.columns[name] = Float32Array.from(take(Uint16Array), (bits) => half(bits) * 2 ** exponent);
  }
  return data;
}

const unpacked = new Map();

// A rollout's data; the 64 that were used last are kept.
function rollout(i) {
  const promise = unpacked.get(i) ?? unpackRollout(i);
  unpacked.delete(i);
  unpacked.set(i, promise);
  if (unpacked.size > 64) unpacked.delete(unpacked.keys().next().value);
  return promise;
}

// The text of a response, in small letters.
async function textOf(i) {
  const { ids, words } = await unpackRollout(i, false);
  return Array.from(ids, (id) => words.texts[id]).join("").toLowerCase();
}
