// Draws phases and buckets of a step for each rank. Ctrl + wheel, pinch, buttons and keys zoom; dragging and arrow
// keys pan; the pointer or n and p select a bar and describe it.
(() => {
  const root = document.getElementById("buckets");
  const steps = JSON.parse(document.getElementById("buckets-data").textContent).steps;
  const svg = root.querySelector("svg"), description = root.querySelector(".selected"), choice = root.querySelector("select");
  const NS = "http://www.w3.org/2000/svg", ROW = 18, GAP = 4, TOP = 24;
  let step = steps[0], from = 0, to = step.seconds, bars = [], chosen = -1, dragged = null;

  const time = s => s >= 1 ? `${s.toFixed(3)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(2)} ms` : `${Math.round(s * 1e6)} µs`;
  const make = (name, attributes, text) => {
    const element = document.createElementNS(NS, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== undefined) element.textContent = text;
    svg.appendChild(element);
    return element;
  };
  const width = () => svg.clientWidth || 600;
  const label = () => width() < 520 ? 44 : 62;
  const x = at => label() + (at - from) / (to - from) * (width() - label());

  // Assign overlapping calls to different rows, using as few rows as possible.
  function rows(calls) {
    const ends = [];
    return calls.map(call => {
      let row = ends.findIndex(end => end <= call.ready);
      if (row < 0) row = ends.length;
      ends[row] = call.end;
      return row;
    });
  }

  function bar(begin, end, y, height, attributes, text) {
    const left = Math.max(x(begin), label()), right = Math.min(x(end), width());
    if (right < label() || left > width()) return;
    const element = make("rect", {x: left, y, width: Math.max(right - left, 0.75), height, ...attributes});
    element.dataset.index = bars.push({element, text}) - 1;
  }

  function ticks(height) {
    const wanted = (to - from) / Math.max(2, (width() - label()) / 110), power = 10 ** Math.floor(Math.log10(wanted));
    const every = [1, 2, 5, 10].map(each => each * power).find(each => each >= wanted);
    for (let at = Math.ceil(from / every) * every; at <= to; at += every) {
      make("line", {x1: x(at), x2: x(at), y1: TOP - 6, y2: height, class: "grid"});
      make("text", {x: Math.min(x(at) + 3, width() - 52), y: 12, class: "tick"}, time(at));
    }
  }

  function draw() {
    svg.replaceChildren();
    bars = [];
    const rowOfCall = step.ranks.map(rank => rows(rank.calls));
    const heights = rowOfCall.map(each => ROW + GAP + (Math.max(-1, ...each) + 1) * (ROW - 6) + 14);
    const height = TOP + heights.reduce((sum, each) => sum + each, 0);
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${width()} ${height}`);
    ticks(height);
    let y = TOP;
    step.ranks.forEach((rank, index) => {
      make("text", {x: 0, y: y + ROW - 5, class: "name"}, width() < 520 ? rank.rank : `rank ${rank.rank}`);
      for (const [part, begin, end] of rank.pieces)
        bar(begin, end, y, ROW, {class: "piece", style: `fill: var(--${part})`},
          `rank ${rank.rank}: ${part === "exposed" ? "exposed communication" : part}, ${time(end - begin)}`);
      rank.calls.forEach((call, number) => {
        const row = y + ROW + GAP + rowOfCall[index][number] * (ROW - 6), high = ROW - 9;
        const start = Math.min(Math.max(call.all, call.launched), call.end);
        const text = `rank ${rank.rank}: ${call.name}, ${call.bytes}; launched at ${time(call.launched)}, ` +
          `by the last rank (${call.last}) at ${time(call.all)}, done at ${time(call.end)}: ` +
          `${time(call.end - start)} in transfer`;
        bar(call.ready, start, row, high, {class: "waiting"}, text);
        bar(start, call.end, row, high, {class: `in-transfer ${call.kind}`}, text);
      });
      y += heights[index];
    });
    if (chosen >= 0) select(Math.min(chosen, bars.length - 1));
  }

  function select(index) {
    bars.forEach(each => each.element.classList.remove("chosen"));
    chosen = index;
    if (index < 0 || !bars[index]) return;
    bars[index].element.classList.add("chosen");
    description.textContent = bars[index].text;
  }

  function view(begin, end) {
    const span = Math.min(Math.max(end - begin, step.seconds / 5000), step.seconds);
    from = Math.min(Math.max(begin, 0), step.seconds - span);
    to = from + span;
    draw();
  }
  const zoom = (factor, at = (from + to) / 2) => view(at - (at - from) * factor, at + (to - at) * factor);
  const move = share => view(from + share * (to - from), to + share * (to - from));
  const under = event => {
    const box = svg.getBoundingClientRect();
    return from + (event.clientX - box.left - label()) / (box.width - label()) * (to - from);
  };

  const keys = {
    "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5), "0": () => view(0, step.seconds),
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
    n: () => select((chosen + 1) % bars.length), p: () => select((chosen - 1 + bars.length) % bars.length),
  };
  svg.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  svg.addEventListener("wheel", event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, under(event));
  }, {passive: false});
  svg.addEventListener("pointerdown", event => {
    dragged = {at: under(event), id: event.pointerId};
  });
  svg.addEventListener("pointermove", event => {
    if (dragged && event.buttons) {
      svg.setPointerCapture(dragged.id);
      const by = dragged.at - under(event);
      view(from + by, to + by);
    } else if (event.target.dataset.index) {
      select(Number(event.target.dataset.index));
    }
  });
  svg.addEventListener("pointerup", event => {
    dragged = null;
    if (event.target.dataset.index) select(Number(event.target.dataset.index));
  });
  root.querySelectorAll("button").forEach(button => button.addEventListener("click", () => keys[button.dataset.key]()));
  steps.forEach((each, index) => choice.add(new Option(each.name, index)));
  choice.addEventListener("change", () => {
    step = steps[choice.value];
    chosen = -1;
    description.textContent = "";
    view(0, step.seconds);
  });
  new ResizeObserver(draw).observe(svg);
  root.hidden = false;
  draw();
})();
