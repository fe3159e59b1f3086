"use strict";
// Values under the pointer, or under a cursor that the arrow keys move: read back from the drawn paths.
for (const plot of document.querySelectorAll(".plot[data-x]")) {
  const [x0, x1] = plot.dataset.x.split(" ").map(Number);
  const edges = plot.dataset.y.split(" ").map(Number);
  const log = plot.dataset.log === "1";
  const [y0, y1] = log ? edges.map(Math.log) : edges;
  const area = plot.querySelector(".area"), cursor = plot.querySelector(".cursor"), out = plot.querySelector("output");
  let curves = null, at = null;
  const read = () => curves ??= [...plot.querySelectorAll(".curve:not(.faint)")].map((path) => ({
    name: path.dataset.name,
    points: path.getAttribute("d").slice(1).split(/[LM]/).map((pair) => pair.split(/[ h]/).map(Number)),
  }));
  const number = (value) => Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-3)
    ? value.toExponential(3) : String(Number(value.toPrecision(4)));
  const show = (x) => {
    at = Math.min(1000, Math.max(0, x));
    cursor.hidden = false;
    cursor.style.left = `${at / 10}%`;
    out.replaceChildren();
    const label = document.createElement("span");
    label.textContent = `step ${Math.round(x0 + (at / 1000) * (x1 - x0)).toLocaleString("en")}`;
    out.append(label);
    for (const { name, points } of read()) {
      let best = points[0];
      for (const point of points) if (Math.abs(point[0] - at) < Math.abs(best[0] - at)) best = point;
      if (Math.abs(best[0] - at) > 25) continue;
      const scaled = y1 - (best[1] / 400) * (y1 - y0), value = document.createElement("b");
      value.textContent = number(log ? Math.exp(scaled) : scaled);
      out.append(` \u00b7 ${name} `, value);
    }
  };
  const hide = () => { cursor.hidden = true; out.replaceChildren(); at = null; };
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    show((1000 * (event.clientX - box.left)) / box.width);
  });
  area.addEventListener("pointerleave", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -10, ArrowRight: 10, PageUp: -100, PageDown: 100 }[event.key];
    if (event.key === "Escape") return hide();
    if (event.key === "Home" || event.key === "End") show(event.key === "Home" ? 0 : 1000);
    else if (move) show((at ?? 500) + move);
    else return;
    event.preventDefault();
  });
  plot.addEventListener("blur", hide);
}
