// What a pointer or the arrow keys do on a figure: show the values at the nearest place.
// Without this script the page loses nothing else.
"use strict";
(() => {
  const svgElement = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  const followPointer = (chart) => {
    const spots = JSON.parse(chart.dataset.spots);
    if (!spots.length) return;
    const box = document.createElement("div");
    box.className = "box";
    box.hidden = true;
    box.setAttribute("role", "status");
    chart.parentElement.append(box);
    const overlay = svgElement("g", { "aria-hidden": "true" });
    chart.append(overlay);
    let current = -1;

    const hide = () => {
      current = -1;
      box.hidden = true;
      overlay.replaceChildren();
    };

    const show = (index) => {
      if (index === current) return;
      current = index;
      const spot = spots[index];
      const label = document.createElement("b");
      label.textContent = spot.label;
      box.replaceChildren(
        label,
        ...spot.rows.map(([name, value]) => {
          const row = document.createElement("div");
          row.textContent = `${name} ${value}`;
          return row;
        }),
      );
      overlay.replaceChildren();
      if (spot.y === null) {
        overlay.append(
          svgElement("line", {
            class: "cross", x1: spot.x, x2: spot.x,
            y1: chart.dataset.top, y2: chart.dataset.bottom,
          }),
        );
      }
      for (const [colour, y] of spot.dots) {
        overlay.append(
          svgElement("circle", { class: `dot halo c${colour}`, cx: spot.x, cy: y, r: 5 }),
        );
      }
      box.hidden = false;
      const frame = chart.getBoundingClientRect();
      const scale = frame.width / chart.viewBox.baseVal.width;
      const left = spot.x * scale;
      const beside = left + 12 + box.offsetWidth > frame.width ? left - 12 - box.offsetWidth : left + 12;
      box.style.left = `${Math.max(0, beside)}px`;
      box.style.top = `${chart.offsetTop + 8}px`;
    };

    const nearest = (event) => {
      const frame = chart.getBoundingClientRect();
      const scale = frame.width / chart.viewBox.baseVal.width;
      const x = (event.clientX - frame.left) / scale;
      const y = (event.clientY - frame.top) / scale;
      const distance = (spot) => Math.hypot(spot.x - x, spot.y === null ? 0 : spot.y - y);
      let found = 0;
      spots.forEach((spot, index) => {
        if (distance(spot) < distance(spots[found])) found = index;
      });
      return found;
    };

    chart.addEventListener("pointermove", (event) => show(nearest(event)));
    chart.addEventListener("pointerdown", (event) => show(nearest(event)));
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1 };
      if (event.key === "Escape") hide();
      if (!(event.key in steps)) return;
      event.preventDefault();
      const next = current < 0 && steps[event.key] < 0 ? spots.length - 1 : current + steps[event.key];
      show(Math.min(spots.length - 1, Math.max(0, next)));
    });
  };

  document.querySelectorAll("svg[data-spots]").forEach(followPointer);
  // On paper nothing can be unfolded.
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((part) => { part.open = true; });
  });
})();
