"use strict";
(() => {
  const box = document.currentScript.closest(".heat"), cells = [...box.querySelectorAll(":scope > .text > span")];
  const { labels, values, nats, difference } = JSON.parse(document.getElementById("heat-data").textContent);
  const label = box.querySelector(".choice"), radio = document.getElementById(label.htmlFor);
  const [a, b] = label.querySelectorAll("select"), view = "v" + radio.id.split("-")[1];
  const legends = box.querySelectorAll(".legend");
  labels.forEach((name, at) => { a.add(new Option(name, at)); b.add(new Option(name, at)); });
  b.add(new Option("nothing", ""), 0);
  a.value = labels.length - 1; b.value = 0;
  radio.hidden = label.hidden = false;
  const level = (value, bounds) => bounds.filter((bound) => value >= bound).length;
  const one = (value) => value === null ? "u" : "p" + level(-value / 100, nats);
  const two = (value) => {
    const at = value === null ? 0 : level(Math.abs(value) / 100, difference);
    return at ? (value > 0 ? "a" : "b") + at : "z";
  };
  function choose() {
    const other = b.value === "" ? null : values[b.value], mine = values[a.value];
    cells.forEach((cell, at) => {
      for (const name of [...cell.classList]) if (name.startsWith(view)) cell.classList.remove(name);
      const known = mine[at] !== null && (other === null || other[at] !== null);
      const value = !known ? null : mine[at] - (other === null ? 0 : other[at]);
      cell.classList.add(view + (other === null ? one(value) : two(value)));
      const name = labels[a.value] + (other === null ? "" : " against " + labels[b.value]);
      cell.dataset.chosen = known && radio.checked ? `\n${name}: ${(value / 100).toFixed(2)} nats` : "";
    });
    legends[0].hidden = radio.checked && other !== null;
    legends[1].hidden = radio.checked && other === null;
  }
  for (const select of [a, b]) select.addEventListener("change", () => { radio.checked = true; choose(); });
  box.addEventListener("change", choose);
  choose();
  // Keyboard: the text is one tab stop, arrows move along it.
  cells[0].tabIndex = 0;
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], at = cells.indexOf(document.activeElement);
    if (step && at >= 0 && cells[at + step]) { cells[at + step].focus(); event.preventDefault(); }
  });
})();
