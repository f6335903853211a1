// What a pointer, the arrow keys and the switches do on the figures of a comparison.
// Without this script the page loses nothing else.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  const makeFigure = (figure) => {
    const chart = figure.querySelector("svg.chart");
    const points = JSON.parse(chart.dataset.points);
    const curves = [...chart.querySelectorAll(".curve")];
    const curveOf = (point) => curves.find((one) => one.dataset.curve === String(point.curve));
    const visible = () => points.filter((point) => !curveOf(point).classList.contains("off"));
    const box = document.createElement("div");
    box.className = "box";
    box.hidden = true;
    box.setAttribute("role", "status");
    figure.append(box);
    const ring = document.createElementNS(SVG, "circle");
    ring.setAttribute("class", "ring");
    ring.setAttribute("r", "7");
    let current = null;

    const hide = () => {
      current = null;
      box.hidden = true;
      ring.remove();
      chart.classList.remove("choosing");
      curves.forEach((one) => one.classList.remove("chosen"));
    };

    const show = (point) => {
      if (point === current) return;
      hide();
      if (!point) return;
      current = point;
      const label = document.createElement("b");
      label.textContent = point.label;
      const list = document.createElement("dl");
      for (const [name, value] of point.rows) {
        const term = document.createElement("dt");
        const text = document.createElement("dd");
        term.textContent = name;
        text.textContent = value;
        list.append(term, text);
      }
      box.replaceChildren(label, list);
      ring.setAttribute("cx", point.x);
      ring.setAttribute("cy", point.y);
      chart.append(ring);
      chart.classList.add("choosing");
      curveOf(point).classList.add("chosen");
      box.hidden = false;
      const scale = chart.getBoundingClientRect().width / chart.viewBox.baseVal.width;
      const left = point.x * scale;
      const width = chart.getBoundingClientRect().width;
      const beside = left + 16 + box.offsetWidth > width ? left - 16 - box.offsetWidth : left + 16;
      box.style.left = `${Math.max(0, beside)}px`;
      box.style.top = `${chart.offsetTop + Math.max(0, point.y * scale - box.offsetHeight - 8)}px`;
    };

    const nearest = (event) => {
      const frame = chart.getBoundingClientRect();
      const scale = frame.width / chart.viewBox.baseVal.width;
      const x = (event.clientX - frame.left) / scale;
      const y = (event.clientY - frame.top) / scale;
      let found = null;
      let least = 60;
      for (const point of visible()) {
        const distance = Math.hypot(point.x - x, point.y - y);
        if (distance < least) [found, least] = [point, distance];
      }
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
      const all = visible();
      if (!all.length) return;
      const from = all.indexOf(current);
      const next = from < 0 ? (steps[event.key] > 0 ? 0 : all.length - 1) : from + steps[event.key];
      show(all[Math.min(all.length - 1, Math.max(0, next))]);
    });

    const switches = [...figure.querySelectorAll(".switches button")];
    return (name, on) => {
      switches.forEach((button, place) => {
        if (button.dataset.name !== name) return;
        button.setAttribute("aria-pressed", String(on));
        curves.find((one) => one.dataset.curve === String(place)).classList.toggle("off", !on);
        hide();
      });
    };
  };

  // A name is switched in all figures that stand together: they show the same for several datasets.
  document.querySelectorAll(".figures").forEach((together) => {
    const setters = [...together.querySelectorAll(".figure")].map(makeFigure);
    together.querySelectorAll(".switches button").forEach((button) => {
      button.addEventListener("click", () => {
        const on = button.getAttribute("aria-pressed") === "false";
        setters.forEach((set) => set(button.dataset.name, on));
      });
    });
  });
  // On paper nothing can be unfolded.
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((part) => { part.open = true; });
  });
})();
