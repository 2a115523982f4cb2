// Show the values under the pointer and zoom into charts. Without this script the page still shows everything.
document.body.classList.add("with-script");
const SIZE = 10000, FARTHEST = 1e5 * SIZE, LAST_SHARE = 0.96; // as in line_chart.py and chart_scale.py
const MOST_LISTED = 8; // curves whose values are shown next to the pointer

function ticks(low, high) {
  const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 2.5, 5, 10].find(factor => unit * factor >= rough * (1 - 1e-9));
  const values = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high * (1 + 1e-12); number++) values.push(number * step);
  return values;
}

function short(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return +(value / size).toPrecision(4) + letter;
  return String(+value.toPrecision(5));
}

// Format a value that was read from the drawing, with no more digits than the drawing's units can resolve.
function read(value, low, high) {
  const unit = 10 ** Math.ceil(Math.log10((high - low) / SIZE));
  return short(Math.round(value / unit) * unit);
}

for (const figure of document.querySelectorAll("figure.chart")) {
  const [x0, x1, y0, y1] = figure.dataset.ranges.split(" ").map(Number), log = figure.dataset.log === "1";
  const logX = figure.dataset.logX === "1";
  const svg = figure.querySelector("svg"), axis = figure.querySelector(".axis").textContent;
  const toX = place => logX ? x0 * (x1 / x0) ** (place / SIZE) : x0 + place / SIZE * (x1 - x0);
  const toY = place => log ? y0 * (y1 / y0) ** (1 - place / SIZE) : y0 + (1 - place / SIZE) * (y1 - y0);
  const fromX = value => (logX ? Math.log(value / x0) / Math.log(x1 / x0) : (value - x0) / (x1 - x0)) * SIZE;
  const fromY = value => (1 - (log ? Math.log(value / y0) / Math.log(y1 / y0) : (value - y0) / (y1 - y0))) * SIZE;
  const lines = [...figure.querySelectorAll(".line")].map(path => ({
    name: path.dataset.name, average: path.classList.contains("bold"),
    points: [...path.getAttribute("d").matchAll(/[ML](-?\d+) (-?\d+)/g)].map(match => [+match[1], +match[2]]),
  }));
  const readX = place => logX ? short(toX(place)) : read(toX(place), x0, x1), readY = place => log ? short(toY(place)) : read(toY(place), y0, y1);
  const fullView = [0, 0, SIZE, SIZE];
  let view = fullView, from = null;
  const svgElement = kind => document.createElementNS("http://www.w3.org/2000/svg", kind);
  const cursor = svgElement("path"), area = svgElement("rect"), values = document.createElement("div");
  cursor.setAttribute("class", "cursor");
  area.setAttribute("class", "zoomed");
  values.className = "values";
  values.hidden = true;
  svg.append(area, cursor);
  figure.append(values);

  const place = event => {
    const box = svg.getBoundingClientRect();
    return view[0] + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * view[2];
  };
  function show(newView) {
    view = newView;
    svg.setAttribute("viewBox", view.join(" "));
    const label = (holder, marks, side, share) => holder.replaceChildren(...marks.map(value => {
      const span = document.createElement("span");
      span.style[side] = 100 * share(value) + "%";
      if (side === "left" && share(value) > LAST_SHARE) span.className = "last";
      span.textContent = short(value);
      return span;
    }));
    const low = toY(view[1] + view[3]), high = toY(view[1]);
    const marks = log ? ticks(low, high).filter(value => value > 0) : ticks(low, high);
    label(figure.querySelector(".x"), ticks(toX(view[0]), toX(view[0] + view[2])), "left", value => (fromX(value) - view[0]) / view[2]);
    label(figure.querySelector(".y"), marks, "bottom", value => 1 - (fromY(value) - view[1]) / view[3]);
    figure.querySelector(".grid").setAttribute("d", marks.map(value => `M0 ${fromY(value)}H${SIZE}`).join(""));
  }
  function zoom(first, last) {
    const heights = lines.flatMap(line => line.points.filter(([x]) => x >= first && x <= last).map(([, y]) => y));
    if (last - first < SIZE / 500 || !heights.length) return;
    const top = Math.min(...heights), bottom = Math.max(...heights), margin = Math.max(20, (bottom - top) * 0.05);
    show([first, top - margin, last - first, bottom - top + 2 * margin]);
  }
  svg.addEventListener("pointermove", event => {
    const at = place(event), rows = [], box = svg.getBoundingClientRect();
    const height = view[1] + (event.clientY - box.top) / box.height * view[3];
    const nearest = lines.filter(line => line.points.length).map(line => [line, line.points.reduce(
      (best, point) => Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best)]);
    if (nearest.length > MOST_LISTED) nearest.sort(([, a], [, b]) => Math.abs(a[1] - height) - Math.abs(b[1] - height));
    for (const [line, point] of nearest.slice(0, MOST_LISTED)) {
      const outside = Math.abs(point[1]) >= FARTHEST ? "beyond " : "", near = Math.abs(point[0] - at) < view[2] / 100;
      const where = line.average && near ? "" : ` at ${readX(point[0])}`;
      rows.push(`${line.name}${where}: ${outside}${readY(point[1])}`);
    }
    cursor.setAttribute("d", `M${at} ${view[1]}v${view[3]}`);
    values.textContent = [`${axis} ${readX(at)}`, ...rows].join("\n");
    values.hidden = false;
    if (from !== null) {
      area.setAttribute("x", Math.min(from, at));
      area.setAttribute("width", Math.abs(at - from));
      area.setAttribute("y", view[1]);
      area.setAttribute("height", view[3]);
    }
  });
  svg.addEventListener("pointerdown", event => {
    if (event.pointerType !== "mouse") return;
    from = place(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointerup", event => {
    if (from !== null) zoom(Math.min(from, place(event)), Math.max(from, place(event)));
    from = null;
    area.setAttribute("width", 0);
  });
  svg.addEventListener("pointerleave", () => {
    values.hidden = true;
    cursor.setAttribute("d", "");
  });
  svg.addEventListener("dblclick", () => show(fullView));
}
