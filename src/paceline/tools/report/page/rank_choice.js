// Shows the ranks that the reader chooses, in every chart and table whose rows name their rank.
(() => {
  const root = document.getElementById("rank-choice"), rows = [...document.querySelectorAll("[data-rank]")];
  const choice = root.querySelector("select"), own = root.querySelector("input"), count = root.querySelector("output");
  const first = new Set(rows.filter(row => !row.hidden).map(row => row.dataset.rank));
  const all = new Set(rows.map(row => row.dataset.rank));

  // Ranks of a text such as "0, 40-43".
  function parse(text) {
    const found = new Set();
    for (const part of text.split(/[\s,]+/).filter(Boolean)) {
      const [, begin, end] = part.match(/^(\d+)(?:[-–](\d+))?$/) || [];
      if (begin === undefined) return null;
      for (const rank of all) if (Number(rank) >= Number(begin) && Number(rank) <= Number(end ?? begin)) found.add(rank);
    }
    return found;
  }
  function show() {
    const wanted = own.value.trim() ? parse(own.value) : choice.value === "all" ? all : first;
    own.setAttribute("aria-invalid", String(!wanted || !wanted.size));
    if (!wanted || !wanted.size) {
      count.textContent = wanted ? "no such rank" : "write ranks as 0, 40-43";
      return;
    }
    rows.forEach(row => { row.hidden = !wanted.has(row.dataset.rank); });
    count.textContent = `${wanted.size} of ${all.size} shown`;
  }
  choice.add(new Option("worst, median and best", "first"));
  choice.add(new Option(`all ${all.size}`, "all"));
  choice.addEventListener("change", () => { own.value = ""; show(); });
  own.addEventListener("input", show);
  root.hidden = false;
  show();
})();
