// Interactive charts of curves: hover or arrow keys read values; dragging, the wheel (with Ctrl, or once the chart has
// the focus), pinching, buttons and keys zoom; smoothing and the x axis apply to all charts of the page.
(() => {
  const NS = "http://www.w3.org/2000/svg", TOP = 10, BOTTOM = 22, charts = [], smooth = {level: 4};

  // ------------------------------------------------------------------ data

  function decode(text, type) {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let at = 0; at < raw.length; at++) bytes[at] = raw.charCodeAt(at);
    return new type(bytes.buffer);
  }

  function readLine(line) {
    const y = decode(line.y, Float32Array), read = key => line[key] && decode(line[key], Float32Array);
    return {...line, x: decode(line.x, Float64Array), t: read("t"), y, low: read("low") || y, high: read("high") || y,
      hidden: false, reach: -1};
  }

  // Centred running mean whose window shrinks symmetrically at the ends; values that are not finite are left out.
  function smoothed(line) {
    const n = line.y.length;
    const reach = line.smooth && smooth.level ? Math.floor(n / 640 * 2 ** (smooth.level - 1)) : 0;
    if (reach === line.reach) return line.mean;
    line.reach = reach;
    line.mean = line.y;
    if (!reach) return line.mean;
    const sums = new Float64Array(n + 1), counts = new Uint32Array(n + 1);
    for (let at = 0; at < n; at++) {
      const known = Number.isFinite(line.y[at]);
      sums[at + 1] = sums[at] + (known ? line.y[at] : 0);
      counts[at + 1] = counts[at] + known;
    }
    line.mean = line.y.map((value, at) => {
      const r = Math.min(reach, at, n - 1 - at);
      return Number.isFinite(value) ? (sums[at + r + 1] - sums[at - r]) / (counts[at + r + 1] - counts[at - r]) : NaN;
    });
    return line.mean;
  }

  // ------------------------------------------------------------------ numbers

  const digits = value => Math.abs(value) >= 1e6 || (value && Math.abs(value) < 1e-3) ? value.toExponential(3).replace(/\.?0+e/, "e")
    : Number(value.toPrecision(4)).toLocaleString("en", {maximumSignificantDigits: 4});
  const short = value => Math.abs(value) < 1e4 ? digits(value) : scaled(value, [[1e9, "G"], [1e6, "M"], [1e3, "k"]]);
  const scaled = (value, units) => {
    const [factor, unit] = units.find(each => Math.abs(value) >= each[0]) || units[units.length - 1];
    return `${digits(value / factor)} ${unit}`;
  };
  const seconds = value => value ? scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) : "0 s";
  const format = {
    plain: digits, seconds, percent: value => `${digits(value)} %`,
    "bytes/s": value => scaled(value, [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]]),
  };
  const clock = value => {
    const [factor, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(each => value >= 3 * each[0]) || [1, "s"];
    return `${digits(value / factor)} ${unit}`;
  };

  function ticks(from, to, wanted, bases = [1, 2, 5, 10]) {
    const least = (to - from) / wanted, power = 10 ** Math.floor(Math.log10(least)), found = [];
    const every = bases.map(each => each * power).find(each => each >= least * 0.999);
    for (let at = Math.ceil(from / every - 1e-9); at * every <= to * (1 + 1e-12) && found.length < 50; at++) found.push(at * every);
    return found;
  }
  function timeTicks(from, to, wanted) {
    const least = (to - from) / wanted;
    const every = [60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400].find(each => each >= least);
    if (least < 30 || !every) return least < 30 ? ticks(from, to, wanted) : ticks(from / 86400, to / 86400, wanted).map(each => each * 86400);
    return Array.from({length: Math.floor(to / every) - Math.ceil(from / every) + 1}, (_, at) => (Math.ceil(from / every) + at) * every);
  }
  function logTicks(from, to, wanted) {
    const found = [];
    for (let power = Math.floor(Math.log10(from)); power <= Math.log10(to); power++)
      for (const base of to / from > 10 ** wanted ? [1] : [1, 2, 5]) {
        const at = base * 10 ** power;
        if (at >= from && at <= to) found.push(at);
      }
    if (found.length < 2) return ticks(from, to, wanted);
    return found.filter((_, at) => at % Math.ceil(found.length / (2 * wanted)) === 0);
  }

  // ------------------------------------------------------------------ one chart

  function chart(figure) {
    const data = JSON.parse(figure.querySelector("script").textContent), lines = data.lines.map(readLine);
    const svg = figure.querySelector("svg"), readout = figure.querySelector(".readout"), bar = figure.querySelector(".bar");
    let axis = data.axes[0], log = data.log, whole = [0, 1], from = 0, to = 1, scale = null, cursor = null, cursorLayer = null;
    const pointers = new Map();
    let drag = null, pinch = null;

    const xs = line => axis === "time" && line.t ? line.t : line.x;
    const shown = () => lines.filter(line => !line.hidden);
    const usable = value => Number.isFinite(value) && (!log || value > 0);
    const make = (name, attributes, parent = svg, text) => {
      const element = document.createElementNS(NS, name);
      for (const key in attributes) element.setAttribute(key, attributes[key]);
      if (text !== undefined) element.textContent = text;
      return parent.appendChild(element);
    };

    // First index of a sorted array whose value is at least `value`.
    function index(values, value) {
      let low = 0, high = values.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (values[middle] < value) low = middle + 1; else high = middle;
      }
      return low;
    }
    const range = line => [Math.max(0, index(xs(line), from) - 1), Math.min(xs(line).length, index(xs(line), to) + 1)];

    function findWhole() {
      let low = Infinity, high = -Infinity;
      for (const line of lines) {
        if (!line.x.length) continue;
        low = Math.min(low, xs(line)[0]);
        high = Math.max(high, xs(line)[line.x.length - 1]);
      }
      for (const at of data.away.flat()) [low, high] = [Math.min(low, at), Math.max(high, at)];
      if (!(low < Infinity)) [low, high] = [0, 1];
      if (axis === "time") low = Math.min(0, low);
      whole = low < high ? [low, high] : [low - 0.5, low + 0.5];
    }

    function findScale() {
      let low = Infinity, high = -Infinity;
      for (const line of shown()) {
        const [begin, end] = range(line);
        for (let at = begin; at < end; at++) {
          if (xs(line)[at] < from || xs(line)[at] > to) continue;
          if (usable(line.low[at])) low = Math.min(low, line.low[at]);
          if (usable(line.high[at])) high = Math.max(high, line.high[at]);
          if (log && line.low[at] <= 0 && usable(line.y[at])) low = Math.min(low, line.y[at]);
        }
      }
      if (!(low <= high)) [low, high] = log ? [1, 10] : [0, 1];
      if (data.zero && !log) low = Math.min(0, low);
      if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
      const pad = log ? (high / low) ** 0.04 : (high - low) * 0.04;
      const bottom = log ? low / pad : data.zero && low === 0 ? 0 : low - pad, top = log ? high * pad : high + pad;
      const width = svg.clientWidth || 600, height = svg.clientHeight || 240, left = width < 520 ? 52 : 64;
      const value = log ? Math.log : each => each;
      const plot = {left, right: width - 10, top: TOP, bottom: height - BOTTOM};
      scale = {
        ...plot, width, height, low: bottom, high: top,
        x: at => plot.left + (at - from) / (to - from) * (plot.right - plot.left),
        y: each => plot.bottom - (value(each) - value(bottom)) / (value(top) - value(bottom)) * (plot.bottom - plot.top),
        at: pixel => from + (pixel - plot.left) / (plot.right - plot.left) * (to - from),
      };
    }

    // Path through (x, values[at]); gaps where a value can't be drawn.
    function path(line, values, [begin, end]) {
      let text = "", pen = "M";
      for (let at = begin; at < end; at++) {
        if (!usable(values[at])) { pen = "M"; continue; }
        text += `${pen}${scale.x(xs(line)[at]).toFixed(1)} ${scale.y(values[at]).toFixed(1)}`;
        pen = "L";
      }
      return text;
    }
    // Area between the least and the greatest value of each segment; one polygon per run of finite values.
    function area(line, [begin, end]) {
      let text = "", run = [];
      const close = () => {
        if (run.length > 1) {
          const edge = (at, values) => `${scale.x(xs(line)[at]).toFixed(1)} ${scale.y(Math.max(values[at], log ? scale.low : -Infinity)).toFixed(1)}`;
          text += `M${run.map(at => edge(at, line.high)).join("L")}L${run.reverse().map(at => edge(at, line.low)).join("L")}Z`;
        }
        run = [];
      };
      for (let at = begin; at < end; at++)
        if (usable(line.high[at]) && Number.isFinite(line.low[at])) run.push(at); else close();
      close();
      return text;
    }

    function draw() {
      findScale();
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${scale.width} ${scale.height}`);
      const clip = `clip${charts.findIndex(each => each.figure === figure)}`;
      make("rect", {x: scale.left, y: 0, width: scale.right - scale.left, height: scale.bottom + 1}, make("clipPath", {id: clip}));
      const rows = Math.max(2, Math.floor((scale.bottom - scale.top) / 42));
      for (const at of log ? logTicks(scale.low, scale.high, rows) : ticks(scale.low, scale.high, rows)) {
        make("line", {x1: scale.left, x2: scale.right, y1: scale.y(at), y2: scale.y(at), class: "scale"});
        make("text", {x: scale.left - 5, y: scale.y(at) + 4, class: "tick", "text-anchor": "end"}, svg, data.number === "plain" ? short(at) : format[data.number](at));
      }
      const columns = Math.max(2, Math.floor((scale.right - scale.left) / 90));
      const marks = axis === "time" ? timeTicks(from, to, columns) : ticks(from, to, columns).filter(Number.isInteger);
      for (const at of marks) {
        const x = scale.x(at), anchor = x > scale.right - 24 ? "end" : "middle";
        make("line", {x1: x, x2: x, y1: scale.bottom, y2: scale.bottom + 4, class: "scale"});
        make("text", {x, y: scale.height - 5, class: "tick", "text-anchor": anchor}, svg, axis === "time" ? clock(at) : at.toLocaleString("en"));
      }
      const plot = make("g", {"clip-path": `url(#${clip})`});
      for (const [begin, end] of data.away)
        make("rect", {x: scale.x(begin), width: Math.max(1, scale.x(end) - scale.x(begin)), y: scale.top, height: scale.bottom - scale.top, class: "away"}, plot);
      for (const line of shown()) drawLine(line, plot);
      let free = -Infinity;  // where the next label covers none
      for (const [step, text, seconds] of data.marks) {
        const at = axis === "time" ? seconds ?? step : step;
        make("line", {x1: scale.x(at), x2: scale.x(at), y1: scale.top, y2: scale.bottom, class: "mark"}, plot);
        if (scale.x(at) < free) continue;
        make("text", {x: scale.x(at) + 4, y: scale.top + 10, class: "tick"}, plot, text);
        free = scale.x(at) + 8 + 7 * text.length;
      }
      cursorLayer = make("g", {});
      drawCursor();
    }

    function drawLine(line, plot) {
      const colour = `var(--c${line.colour})`, visible = range(line), group = make("g", {class: line.style}, plot);
      if (line.style === "crosses") {
        for (let at = visible[0]; at < visible[1]; at++)
          if (usable(line.y[at])) make("path", {d: `M${scale.x(xs(line)[at]) - 4} ${scale.y(line.y[at]) - 4}l8 8m0 -8l-8 8`, class: "cross"}, group);
        return;
      }
      const mean = smoothed(line);
      if (line.size) make("path", {d: area(line, visible), class: "band", fill: colour}, group);
      else if (mean !== line.y) make("path", {d: path(line, line.y, visible), class: "raw", stroke: colour}, group);
      make("path", {d: path(line, mean, visible), class: "mean", stroke: colour}, group);
      if (visible[1] - visible[0] < 27 && line.style !== "dashed")
        for (let at = visible[0]; at < visible[1]; at++)
          if (usable(mean[at])) make("circle", {cx: scale.x(xs(line)[at]), cy: scale.y(mean[at]), r: 2.5, fill: colour}, group);
    }

    // ---------------------------------------------------------------- reading values

    function nearest(line, value) {
      const values = xs(line), after = index(values, value);
      if (after === values.length) return after - 1;
      return after && value - values[after - 1] < values[after] - value ? after - 1 : after;
    }
    const longest = () => shown().reduce((one, other) => other.x.length > one.x.length ? other : one, shown()[0]);

    function where(line, at) {
      if (axis === "time") return clock(line.t ? line.t[at] : line.x[at]);
      const first = line.x[at] - Math.floor(((line.size || 1) - 1) / 2);
      return line.size ? `steps ${first.toLocaleString("en")} to ${(first + line.size - 1).toLocaleString("en")}` : `step ${line.x[at].toLocaleString("en")}`;
    }

    function drawCursor() {
      cursorLayer?.replaceChildren();
      const main = longest();
      if (cursor === null || !main || !main.x.length) { readout.textContent = ""; return; }
      const number = nearest(main, cursor), at = xs(main)[number], texts = [];
      if (at < from || at > to) { readout.textContent = ""; return; }
      make("line", {x1: scale.x(at), x2: scale.x(at), y1: scale.top, y2: scale.bottom, class: "cursor"}, cursorLayer);
      for (const line of shown()) {
        const place = nearest(line, at), mean = smoothed(line);
        if (place < 0 || (line.x.length < main.x.length / 2 && Math.abs(scale.x(xs(line)[place]) - scale.x(at)) > 12)) continue;
        const value = line.y[place], name = lines.length > 1 ? `${line.name} ` : "";
        if (!Number.isFinite(value)) { texts.push(`${name}not finite`); continue; }
        const more = line.size ? ` (${format[data.number](line.low[place])} to ${format[data.number](line.high[place])})`
          : mean !== line.y ? ` (smoothed ${format[data.number](mean[place])})` : "";
        texts.push(name + format[data.number](value) + more);
        if (usable(mean[place])) make("circle", {cx: scale.x(xs(line)[place]), cy: scale.y(mean[place]), r: 4, fill: `var(--c${line.colour})`}, cursorLayer);
      }
      readout.textContent = `${where(main, number)}: ${texts.join(" · ")}`;
    }

    function step(by) {
      const main = longest();
      if (!main || !main.x.length) return;
      const values = xs(main), begin = index(values, from), end = index(values, to + 1e-12) - 1;
      const present = cursor === null ? (by > 0 ? begin - 1 : end + 1) : nearest(main, cursor);
      cursor = values[Math.min(Math.max(present + by, begin), Math.max(begin, end))];
      drawCursor();
    }

    // ---------------------------------------------------------------- zoom

    function view(begin, end) {
      const length = whole[1] - whole[0], span = Math.min(Math.max(end - begin, length / 1e4), length);
      from = Math.min(Math.max(begin, whole[0]), whole[1] - span);
      to = from + span;
      draw();
    }
    const zoom = (factor, at = cursor !== null && cursor >= from && cursor <= to ? cursor : (from + to) / 2) =>
      view(at - (at - from) * factor, at + (to - at) * factor);
    const move = share => view(from + share * (to - from), to + share * (to - from));
    const reset = () => view(...whole);
    const under = event => scale.at(event.clientX - svg.getBoundingClientRect().left);
    const zoomed = () => to - from < (whole[1] - whole[0]) * 0.999;

    const keys = {
      "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5), "0": reset, Escape: reset,
      ArrowLeft: event => event.shiftKey ? move(-0.2) : step(-1), ArrowRight: event => event.shiftKey ? move(0.2) : step(1),
      PageUp: () => step(-10), PageDown: () => step(10), Home: () => step(-1e9), End: () => step(1e9),
      l: () => { box.checked = log = !log; draw(); },
    };
    svg.addEventListener("keydown", event => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key](event);
    });
    svg.addEventListener("wheel", event => {
      if (!event.ctrlKey && document.activeElement !== svg) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, under(event));
    }, {passive: false});
    svg.addEventListener("dblclick", reset);
    svg.addEventListener("pointerdown", event => {
      pointers.set(event.pointerId, event.clientX);
      svg.setPointerCapture(event.pointerId);
      drag = {begin: under(event), x: event.clientX, touch: event.pointerType === "touch"};
      pinch = pointers.size === 2 ? {gap: Math.abs(gap()), from, to, at: middle()} : null;
      cursor = under(event);
      drawCursor();
    });
    const gap = () => { const [one, other] = [...pointers.values()]; return one - other; };
    const middle = () => { const [one, other] = [...pointers.values()]; return scale.at((one + other) / 2 - svg.getBoundingClientRect().left); };
    svg.addEventListener("pointermove", event => {
      if (pointers.has(event.pointerId)) pointers.set(event.pointerId, event.clientX);
      if (pinch && pointers.size === 2) {
        const factor = pinch.gap / Math.max(Math.abs(gap()), 10);
        view(pinch.at - (pinch.at - pinch.from) * factor, pinch.at + (pinch.to - pinch.at) * factor);
      } else if (drag && drag.touch && zoomed()) {
        const by = drag.begin - under(event);
        view(from + by, to + by);
      } else {
        cursor = under(event);
        drawCursor();
        if (drag && !drag.touch) {
          const edges = [scale.x(drag.begin), scale.x(cursor)].sort((one, other) => one - other);
          make("rect", {x: edges[0], width: edges[1] - edges[0], y: scale.top, height: scale.bottom - scale.top, class: "selection"}, cursorLayer);
        }
      }
    });
    svg.addEventListener("pointerup", event => {
      if (drag && !drag.touch && Math.abs(event.clientX - drag.x) > 6) {
        const edges = [drag.begin, under(event)].sort((one, other) => one - other);
        view(...edges);
      }
    });
    for (const name of ["pointerup", "pointercancel"])
      svg.addEventListener(name, event => { pointers.delete(event.pointerId); drag = pinch = null; });
    svg.addEventListener("pointerleave", event => {
      if (event.pointerType === "mouse" && document.activeElement !== svg) { cursor = null; drawCursor(); }
    });

    // ---------------------------------------------------------------- controls

    function control(tag, properties, label) {
      const element = Object.assign(document.createElement(tag), properties);
      if (label) {
        const outer = document.createElement("label");
        outer.append(label, element);
        bar.append(outer);
      } else bar.append(element);
      return element;
    }
    let axisChoice = null, slider = null;
    if (data.axes.length > 1) {
      axisChoice = control("select", {}, "x axis");
      for (const [value, text] of [["step", "step"], ["time", "wall time"]]) axisChoice.add(new Option(text, value));
      axisChoice.addEventListener("change", () => charts.forEach(each => each.setAxis(axisChoice.value)));
    }
    if (lines.some(line => line.smooth && line.x.length > 60)) {
      slider = control("input", {type: "range", min: 0, max: 8, value: smooth.level}, "smoothing");
      slider.addEventListener("input", () => {
        smooth.level = Number(slider.value);
        charts.forEach(each => each.setSmoothing());
      });
    }
    const box = control("input", {type: "checkbox", checked: log}, "log");
    box.addEventListener("change", () => { log = box.checked; draw(); });
    for (const [text, name, key] of [["+", "zoom in", "+"], ["−", "zoom out", "-"], ["reset", "reset zoom", "0"]]) {
      const button = control("button", {type: "button", textContent: text});
      button.setAttribute("aria-label", name);
      button.addEventListener("click", () => keys[key]({}));
    }
    const legend = figure.querySelector(".legend");
    if (lines.length === 1 && !lines[0].name) legend.remove();
    else for (const line of lines) {
      const item = document.createElement("li"), button = document.createElement("button"), sample = document.createElement("i");
      sample.style.background = sample.style.color = line.style === "crosses" ? "var(--ink)" : `var(--c${line.colour})`;
      button.type = "button";
      button.className = line.style;
      button.setAttribute("aria-pressed", "true");
      button.append(sample, line.name);
      button.addEventListener("click", () => {
        line.hidden = !line.hidden;
        button.setAttribute("aria-pressed", String(!line.hidden));
        draw();
      });
      item.append(button);
      legend.append(item);
    }

    const self = {
      figure,
      setAxis(value) {
        if (!data.axes.includes(value) || value === axis) return;
        axis = axisChoice.value = value;
        cursor = null;
        findWhole();
        reset();
      },
      setSmoothing() {
        if (!slider) return;
        slider.value = smooth.level;
        draw();
      },
    };
    charts.push(self);
    findWhole();
    [from, to] = whole;
    draw();  // before any key or pointer event: those need the scale, and the observer calls in a later frame
    new ResizeObserver(() => { if (svg.clientWidth !== scale.width) draw(); }).observe(svg);
  }
  document.querySelectorAll("figure.curves").forEach(chart);
})();
