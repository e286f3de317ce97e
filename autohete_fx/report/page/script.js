(() => {
  "use strict";
  const box = document.getElementById("hint");
  let chosen = null;

  // Hints of shapes become one box that follows the pointer, and that the arrow keys walk through.
  for (const title of document.querySelectorAll(".chart title")) {
    title.parentNode.setAttribute("data-hint", title.textContent);
    title.remove();
  }

  function show(shape, x, y) {
    if (chosen) chosen.classList.remove("chosen");
    chosen = shape;
    if (!shape) { box.hidden = true; return; }
    shape.classList.add("chosen");
    box.textContent = shape.getAttribute("data-hint");
    box.hidden = false;
    const left = Math.min(x + 14, window.innerWidth - box.offsetWidth - 12);
    const below = y + 16 + box.offsetHeight < window.innerHeight;
    box.style.left = Math.max(12, left) + "px";
    box.style.top = Math.max(8, below ? y + 16 : y - box.offsetHeight - 12) + "px";
  }

  document.addEventListener("pointermove", (event) => {
    const shape = event.target instanceof Element ? event.target.closest("[data-hint]") : null;
    if (shape || chosen) show(shape, event.clientX, event.clientY);
  });
  document.addEventListener("pointerdown", (event) => {
    const shape = event.target instanceof Element ? event.target.closest("[data-hint]") : null;
    show(shape, event.clientX, event.clientY);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return show(null);
    const chart = document.activeElement;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !chart || !chart.classList.contains("chart")) return;
    const shapes = [...chart.querySelectorAll("[data-hint]")];
    if (!shapes.length) return;
    event.preventDefault();
    const at = shapes.indexOf(chosen);
    const next = shapes[at < 0 ? (step > 0 ? 0 : shapes.length - 1) : (at + step + shapes.length) % shapes.length];
    const place = next.getBoundingClientRect();
    show(next, place.left + place.width / 2, place.top + Math.min(place.height, 40));
  });

  // A plot of many bars can be widened and scrolled.
  for (const scroll of document.querySelectorAll("[data-zooms]")) {
    const label = document.createElement("label");
    label.className = "zoom";
    const range = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 5, step: 0.1, value: 0 });
    label.append("Zoom", range);
    range.addEventListener("input", () => {
      const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / scroll.scrollWidth;
      scroll.firstElementChild.style.setProperty("--zoom", String(2 ** range.value));
      scroll.scrollLeft = middle * scroll.scrollWidth - scroll.clientWidth / 2;
    });
    scroll.parentNode.after(label);
  }
})();
