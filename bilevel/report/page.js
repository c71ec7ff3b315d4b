"use strict";
(() => {
  const keep = (key, value) => { try { sessionStorage.setItem(key, value); } catch (error) { /* not allowed here */ } };
  const kept = (key) => { try { return sessionStorage.getItem(key); } catch (error) { return null; } };
  const place = "bilevel " + location.pathname;

  // How long ago a log grew, counted on.
  const words = (s) => {
    if (s < 60) return Math.floor(s) + " s";
    if (s < 3600) return Math.floor(s / 60) + " min " + Math.floor(s % 60) + " s";
    if (s < 86400) return Math.floor(s / 3600) + " h " + Math.floor(s % 3600 / 60) + " min";
    return Math.floor(s / 86400) + " d " + Math.floor(s % 86400 / 3600) + " h";
  };
  const ages = [...document.querySelectorAll(".age")];
  if (ages.length) setInterval(() => {
    for (const age of ages) age.textContent = words(Math.max(0, Date.now() / 1000 - age.dataset.written));
  }, 1000);

  // Load again, and stay where the reader is.
  const folds = [...document.querySelectorAll("details")];
  const before = JSON.parse(kept(place) || "null");
  if (document.body.dataset.refresh) {
    if (before) {
      for (const [index, fold] of folds.entries()) fold.open = before.open.includes(index);
      scrollTo(0, before.top);
    }
    const note = () => keep(place, JSON.stringify({
      top: scrollY, open: folds.flatMap((fold, index) => fold.open ? [index] : []) }));
    addEventListener("pagehide", note);
    const again = () => {
      if (document.hidden || document.querySelector(".tip")) { setTimeout(again, 1000); return; }
      note();
      location.reload();
    };
    setTimeout(again, 1000 * document.body.dataset.refresh);
  } else if (before) {
    for (const [index, fold] of folds.entries()) fold.open = before.open.includes(index);
    scrollTo(0, before.top);
    keep(place, "null");
  }

  // The values below the pointer, read from the lines themselves.
  const shown = (v) => {
    const size = Math.abs(v);
    if (size === 0) return "0";
    return size >= 1e-3 && size < 1e5 ? String(+v.toPrecision(4)) : v.toExponential(2).replace("e+", "e");
  };
  const points = (path) => {
    const found = [];
    let x = 0;
    for (const [, letter, one, other] of path.getAttribute("d").matchAll(/([MLHV])(-?\d+)(?: (-?\d+))?/g)) {
      if (letter === "H") x = +one;
      else if (letter === "V") found.push([x, +one]);
      else found.push([x = +one, +other]);
    }
    return found;
  };
  const nearest = (own, x) => {
    let low = 0, high = own.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (own[middle][0] < x) low = middle; else high = middle;
    }
    return x - own[low][0] < own[high][0] - x ? own[low] : own[high];
  };
  for (const plot of document.querySelectorAll(".plot")) {
    let lines = null, tip = null, cursor = null;
    const [x0, x1] = plot.dataset.x.split(" ").map(Number);
    const [y0, y1] = plot.dataset.y.split(" ").map(Number);
    const log = plot.dataset.log === "1";
    const value = (y) => {
      const share = 1 - y / 1e4;
      return log ? Math.exp(Math.log(y0) + share * (Math.log(y1) - Math.log(y0))) : y0 + share * (y1 - y0);
    };
    const leave = () => { if (tip) { tip.remove(); cursor.remove(); tip = null; } };
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("pointermove", (event) => {
      lines = lines || [...plot.querySelectorAll("path.line[data-label]")]
        .map((path) => ({ label: path.dataset.label, hue: [...path.classList].find((c) => /^k\d+$/.test(c)), own: points(path) }))
        .filter((line) => line.own.length);
      if (!lines.length) return;
      const box = plot.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const found = lines.map((line) => ({ ...line, at: nearest(line.own, share * 1e4) }));
      const x = found.reduce((a, b) => Math.abs(b.at[0] - share * 1e4) < Math.abs(a.at[0] - share * 1e4) ? b : a).at[0];
      if (!tip) {
        tip = document.createElement("div");
        cursor = document.createElement("div");
        tip.className = "tip";
        cursor.className = "cursor";
        plot.append(cursor, tip);
      }
      cursor.style.left = x / 100 + "%";
      const head = document.createElement("div");
      head.textContent = plot.dataset.label + " " + shown(Math.round((x0 + x / 1e4 * (x1 - x0)) * 10) / 10);
      const rows = found.slice(0, 10).map((line) => {
        const row = document.createElement("div"), swatch = document.createElement("i");
        swatch.className = line.hue;
        row.append(swatch, line.label + " " + shown(value(line.at[1])));
        return row;
      });
      tip.replaceChildren(head, ...rows);
      tip.style.left = x < 5e3 ? "calc(" + x / 100 + "% + 10px)" : "auto";
      tip.style.right = x < 5e3 ? "auto" : "calc(" + (100 - x / 100) + "% + 10px)";
    });
  }
})();
