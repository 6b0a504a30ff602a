(async () => {
  if (typeof DecompressionStream === "undefined") {
    const nothing = document.getElementById("nothing");
    nothing.textContent = "This browser is too old for the report: it needs Chrome 103, Firefox 113, Safari 16.4 or newer.";
    nothing.hidden = false;
    document.getElementById("bench").hidden = document.getElementById("filters").hidden = true;
    return;
  }
  const r = {};
  for (const part of parts) await part(r);
  performance.mark("ready");
  document.documentElement.dataset.ready = "yes";
})();
