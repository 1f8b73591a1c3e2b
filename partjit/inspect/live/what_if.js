// The fields of a program's specs, beside what the program would cost with them. Each change of a field changes the trait
// `specs`; the kernel answers in the trait `answer`. While an answer is pending, changes are collected. All text that
// comes from the program is put into the page as text.

const LARGEST = 300; // rows that are made at once
const COLORS = 12;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// What a dimension may be sharded over: nothing, an axis, or two axes in either order.
function choicesOf(axes) {
  const pairs = axes.flatMap((a) => axes.filter((b) => b !== a).map((b) => [a, b]));
  return [[], ...axes.map((a) => [a]), ...pairs];
}

function specText(dims) {
  const entry = (axes) => (axes.length === 1 ? `'${axes[0]}'` : `(${axes.map((a) => `'${a}'`).join(", ")})`);
  return `P(${dims.map((axes) => (axes.length ? entry(axes) : "None")).join(", ")})`;
}

// The rows that are shown: those that are alike but for numbers are one, unless each is to be shown by itself.
function grouped(rows, isFolded) {
  const groups = new Map();
  for (const row of rows) {
    const key = isFolded ? JSON.stringify([row.kind, row.pattern, row.array, row.spec, row.is_chosen]) : row.name;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  return [...groups.values()];
}

function tableOf(title, columns, rows, cell) {
  const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
  const body = rows.map((row) => make("tr", {}, ...row.map((text, k) => cell(text, k))));
  return make("table", { "aria-label": title }, make("thead", {}, head), make("tbody", {}, ...body));
}

function render({ model, el }) {
  const program = model.get("program");
  const axes = program.mesh.map(([name]) => name);
  const choices = choicesOf(axes);
  const shown = []; // for each row that is in the page: its members, its field, its choices
  let pending = false;
  let wanted = { ...model.get("specs") };

  // JupyterLab leaves keys alone below this attribute.
  const root = make("div", { class: "pj pj-what-if", "data-lm-suppress-shortcuts": "true" });
  root.addEventListener("keydown", (event) => event.stopPropagation());

  const status = make("output", { "aria-live": "polite" });
  const search = make("input", { type: "search", placeholder: "search names", "aria-label": "search names" });
  const fold = make("input", { type: "checkbox" });
  fold.checked = true;
  const follow = make("input", { type: "checkbox" });
  follow.checked = model.get("follow");
  const reset = make("button", { type: "button" }, "as it is");
  const chips = program.mesh.map(([name, size], k) => make("span", { class: `pj-x${k % COLORS}` }, `${name}=${size}`));
  const tools = make(
    "div",
    { class: "pj-tools" },
    search,
    make("label", {}, fold, " layers that are alike together"),
    make("label", {}, follow, " optimizer state and results follow"),
    reset,
    status,
  );
  const rows = make("div", { class: "pj-fields", role: "group", "aria-label": "specs" });
  const wrong = make("pre", { class: "pj-wrong", role: "alert", hidden: true });
  const figures = make("div", { class: "pj-figures" });
  const title = make("p", { class: "pj-title" }, make("b", { class: "pj-mono" }, program.name), " ", ...chips);
  root.append(title, tools, make("div", { class: "pj-columns" }, rows, make("div", {}, wrong, figures)));
  el.append(root);

  // ---- questions

  function send() {
    if (pending) return;
    const before = JSON.stringify([model.get("specs"), model.get("follow")]);
    if (JSON.stringify([wanted, follow.checked]) === before) return;
    pending = true;
    status.textContent = "asking ...";
    model.set("specs", { ...wanted });
    model.set("follow", follow.checked);
    model.save_changes();
  }

  function change(members, text) {
    wanted = { ...wanted };
    for (const row of members) {
      if (text.trim() === "" || text.trim() === row.spec) delete wanted[row.name];
      else wanted[row.name] = text.trim();
    }
    send();
  }

  // ---- rows

  function axesNow(row) {
    return model.get("answer").axes?.[row.name] ?? row.axes;
  }

  function rowOf(members) {
    const [row] = members;
    const name = members.length > 1 ? `${row.pattern} x ${members.length}` : row.name;
    const field = make("input", {
      class: "pj-mono",
      type: "text",
      spellcheck: "false",
      autocomplete: "off",
      placeholder: row.is_chosen ? `${row.spec}, chosen` : row.spec,
      "aria-label": `spec of ${name}`,
    });
    const selects = row.axes.map((_, dim) => {
      const options = choices.map((one, k) => make("option", { value: k }, one.join(", ") || "–"));
      return make("select", { "aria-label": `dimension ${dim} of ${name}` }, ...options);
    });
    const entry = { members, field, selects };
    field.addEventListener("change", () => change(members, field.value));
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      field.value = "";
      change(members, "");
    });
    selects.forEach((select, dim) =>
      select.addEventListener("change", () => {
        const dims = axesNow(row).map((own, k) => (k === dim ? choices[select.value] : own));
        field.value = specText(dims);
        change(members, field.value);
      }),
    );
    const text = make("span", { class: "pj-name pj-mono", title: members.map((one) => one.name).join("\n") }, name);
    const type = make("span", { class: "pj-muted-text" }, `${row.array} ${row.size}`);
    entry.element = make("div", { class: "pj-row" }, text, type, make("span", {}, ...selects), field);
    shown.push(entry);
    return entry.element;
  }

  function drawRows() {
    shown.length = 0;
    const text = search.value.toLowerCase();
    const found = program.rows.filter((row) => row.name.toLowerCase().includes(text));
    const all = grouped(found, fold.checked);
    const kinds = new Map();
    for (const members of all.slice(0, LARGEST)) {
      const [row] = members;
      const of = row.kind === "argument" ? row.name.split(/[.[]/)[0] : "results";
      if (!kinds.has(of)) kinds.set(of, []);
      kinds.get(of).push(members);
    }
    const parts = [...kinds].map(([name, of], k) => {
      const head = make("summary", {}, make("b", {}, name), ` (${of.length})`);
      return make("details", { open: k === 0 || text !== "" }, head, ...of.map(rowOf));
    });
    if (all.length > LARGEST) parts.push(make("p", {}, `... and ${all.length - LARGEST} more: search for them`));
    rows.replaceChildren(...parts);
    drawFields();
  }

  // The texts and choices of the rows, without making them anew: the focus stays where it is.
  function drawFields() {
    const wrongNames = new Set(model.get("answer").wrong ?? []);
    for (const { members, field, selects } of shown) {
      const texts = new Set(members.map((row) => wanted[row.name] ?? ""));
      if (field !== field.getRootNode().activeElement || field.value.trim() === "") {
        field.value = texts.size === 1 ? [...texts][0] : "";
      }
      const isWrong = members.some((row) => wrongNames.has(row.name));
      field.setAttribute("aria-invalid", String(isWrong));
      field.classList.toggle("pj-is-changed", members.some((row) => row.name in wanted));
      const dims = axesNow(members[0]);
      selects.forEach((select, dim) => {
        const k = choices.findIndex((one) => one.join() === (dims[dim] ?? []).join());
        select.selectedIndex = k; // nothing is shown of three axes
        select.className = dims[dim]?.length === 1 ? `pj-x${axes.indexOf(dims[dim][0]) % COLORS}` : "";
      });
    }
  }

  // ---- answers

  function compared(title, of, found) {
    const head = make("thead", {}, make("tr", {}, ...[of, "now", "then"].map((t) => make("th", { scope: "col" }, t))));
    const body = found.map(([label, before, after, change]) => {
      const said = make("td", { class: `pj-is-${change}` }, after);
      if (change !== "same") said.append(make("span", { class: "pj-sign" }, change === "less" ? " ↓" : " ↑"));
      return make("tr", {}, make("th", { scope: "row" }, label), make("td", {}, before), said);
    });
    return make("table", { "aria-label": title }, head, make("tbody", {}, ...body));
  }

  function drawAnswer() {
    const answer = model.get("answer");
    wrong.hidden = !answer.error;
    wrong.textContent = answer.error ?? "";
    figures.classList.toggle("pj-is-old", Boolean(answer.error));
    if (answer.error) {
      status.textContent = "not answered";
      return drawFields();
    }
    status.textContent = `answered in ${Math.max(1, Math.round(1000 * answer.seconds))} ms`;
    const parts = [compared("totals", "per step and device", answer.totals)];
    if (answer.by_axes.length) parts.push(compared("bytes sent by axes", "bytes sent over", answer.by_axes));
    if (answer.collectives.length) parts.push(compared("collectives", "collectives", answer.collectives));
    if (answer.unknown.length) {
      parts.push(make("p", { class: "pj-muted-text" }, `Without ${answer.unknown.join("; ")}.`));
    }
    const most = answer.specs.slice(0, LARGEST);
    if (most.length) {
      const columns = ["sharded otherwise", "now", "then"];
      const code = (text, k) => make(k ? "td" : "th", k ? { class: "pj-mono" } : { scope: "row", class: "pj-mono" }, text);
      parts.push(make("div", { class: "pj-wide" }, tableOf("specs that changed", columns, most, code)));
      const python = make("pre", { class: "pj-mono" }, answer.python);
      parts.push(make("details", {}, make("summary", {}, "the question in Python"), python));
    }
    figures.replaceChildren(...parts);
    drawFields();
  }

  function onAnswer() {
    pending = false;
    drawAnswer();
    send(); // what was changed meanwhile
  }

  function onSpecs() {
    if (!pending) wanted = { ...model.get("specs") };
    drawFields();
  }

  function onFollow() {
    follow.checked = model.get("follow");
  }

  search.addEventListener("input", drawRows);
  fold.addEventListener("change", drawRows);
  follow.addEventListener("change", send);
  reset.addEventListener("click", () => {
    wanted = {};
    for (const { field } of shown) field.value = "";
    send();
  });
  model.on("change:answer", onAnswer);
  model.on("change:specs", onSpecs);
  model.on("change:follow", onFollow);
  drawRows();
  drawAnswer();
  return () => {
    model.off("change:answer", onAnswer);
    model.off("change:specs", onSpecs);
    model.off("change:follow", onFollow);
  };
}

export default { render };
