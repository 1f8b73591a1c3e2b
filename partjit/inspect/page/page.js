// What a reader can do in the page of a report: sort, search and filter tables, fold and search the program, and open the
// source line or the picture that belongs to a row. The page is complete without it. It may run once for each report in a
// notebook, in any order, so it sets up every report that is not set up yet and keeps to what is inside of each.
(() => {
  "use strict";

  const collator = new Intl.Collator("en", { numeric: true });

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  function shownBytes(size) {
    if (size < 1000) return `${size.toFixed(0)} B`;
    const units = ["kB", "MB", "GB", "TB", "PB"];
    let k = -1;
    while (size >= 1000 && k < units.length - 1) [size, k] = [size / 1000, k + 1];
    return `${size.toFixed(1)} ${units[k]}`;
  }

  // ---- what a link opens: a line of a file with those around it, or a picture

  const AROUND = 6;

  function detailOf(root, link) {
    const target = root.querySelector(`#${CSS.escape(link.hash.slice(1))}`);
    if (!target) return null;
    if (target.matches("figure, .pj-reason")) return copyOf(target);
    const file = target.closest(".pj-file");
    const shown = make("section", { class: "pj-file" }, make("h3", { class: "pj-mono" }, link.title));
    if (!target.matches(".pj-line")) {
      shown.append(...[...file.querySelectorAll("p")].map(copyOf));
      return shown;
    }
    const number = Number(target.dataset.k);
    const lines = [...file.querySelectorAll(".pj-line")].filter((l) => Math.abs(l.dataset.k - number) <= AROUND);
    shown.append(make("pre", { class: "pj-mono" }, ...lines.map(copyOf)));
    shown.querySelector(`[data-k="${number}"]`).classList.add("pj-target");
    return shown;
  }

  function copyOf(element) {
    const copy = element.cloneNode(true);
    for (const inner of [copy, ...copy.querySelectorAll("[id]")]) inner.removeAttribute("id");
    return copy;
  }

  // Opens what a link leads to below its row, or closes it if that is open already.
  function toggle(root, row, link, around) {
    const open = row.nextElementSibling;
    if (open?.matches(".pj-detail")) {
      open.remove();
      row.classList.remove("pj-opened");
      if (open.dataset.of === link?.hash) return;
    }
    const detail = link && detailOf(root, link);
    const parts = [detail, around?.(row)].filter(Boolean);
    if (!parts.length) return;
    row.classList.add("pj-opened");
    const inRow = row.matches("tr");
    const box = make(inRow ? "tr" : "div", { class: "pj-detail" });
    box.dataset.of = link?.hash ?? "";
    if (inRow) box.append(make("td", { colspan: row.cells.length }, ...parts));
    else box.append(...parts);
    row.after(box);
  }

  function closeDetails(container) {
    for (const detail of container.querySelectorAll(".pj-detail")) detail.remove();
    for (const row of container.querySelectorAll(".pj-opened")) row.classList.remove("pj-opened");
  }

  // Rows open by a click or the enter key, and the arrow keys go from one to the next: a table is one stop for the tab key.
  function opens(root, container, rowSelector, around) {
    const own = 'a[href^="#"]:not(.pj-y)'; // a click opens the source of a row rather than the reasons for its sharding
    const links = () => [...container.querySelectorAll(`${rowSelector} ${own}`)];
    links().forEach((link, k) => link.setAttribute("tabindex", k ? "-1" : "0"));
    container.addEventListener("click", (event) => {
      if (event.target.closest("summary .pj-detail")) event.preventDefault(); // is no click on what folds
      const link = event.target.closest('a[href^="#"]');
      const row = event.target.closest(rowSelector);
      if (!row || event.target.closest(".pj-detail, button")) return;
      const first = link ?? row.querySelector(own) ?? row.querySelector('a[href^="#"]');
      if (link) event.preventDefault();
      else if ((!first && !around) || !getSelection().isCollapsed) return;
      if (!link && row.parentElement.matches("summary")) return; // which folds
      toggle(root, row, first, around);
    });
    container.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") closeDetails(container);
      if (!step || !event.target.matches('a[href^="#"]')) return;
      const all = links();
      for (let k = all.indexOf(event.target) + step; all[k]; k += step) {
        if (!isVisible(all[k])) continue;
        event.preventDefault();
        event.target.setAttribute("tabindex", "-1");
        all[k].setAttribute("tabindex", "0");
        all[k].focus();
        break;
      }
    });
  }

  function isVisible(element) {
    return element.checkVisibility ? element.checkVisibility() : element.getClientRects().length > 0;
  }

  // ---- tables

  // The heads of columns, which may have a row above them for several of them.
  function headsOf(table) {
    return [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  }

  function valueOf(cell, isNumber) {
    if (isNumber) return cell.dataset.v === undefined ? null : Number(cell.dataset.v);
    return cell.textContent.trim() || null;
  }

  function sortBy(table, k, direction) {
    const isNumber = headsOf(table)[k].matches(".pj-r");
    const keyed = [...table.tBodies[0].rows].map((row) => [valueOf(row.cells[k], isNumber), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null); // what is not known comes last in either order
      return direction * (isNumber ? a - b : collator.compare(a, b));
    });
    table.tBodies[0].append(...keyed.map(([, row]) => row));
  }

  function sortable(table) {
    const heads = headsOf(table);
    heads.forEach((head, k) => {
      if (!head.textContent) return;
      const button = make("button", { type: "button" }, head.textContent);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        closeDetails(table);
        const before = head.getAttribute("aria-sort");
        // The largest number first, and the first name.
        const isDown = before ? before === "ascending" : head.matches(".pj-r");
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        sortBy(table, k, isDown ? -1 : 1);
      });
    });
  }

  function filterable(table) {
    const rows = [...table.tBodies[0].rows];
    const heads = headsOf(table).map((head) => head.textContent);
    const title = table.getAttribute("aria-label");
    const search = make("input", { type: "search", placeholder: "search", "aria-label": `search in ${title}` });
    const chosen = (table.dataset.filters ?? "").split(" ").filter(Boolean).map(Number);
    const selects = chosen.map((k) => {
      const values = new Set(rows.flatMap((row) => row.cells[k].textContent.split(", ")));
      const options = [...values].sort(collator.compare).map((value) => new Option(value, value));
      const every = new Option(`${heads[k]}: all`, "");
      return make("select", { "aria-label": `${heads[k]} in ${title}` }, every, ...options);
    });
    const output = make("output", { "aria-live": "polite" });
    const texts = new Map();
    const update = () => {
      closeDetails(table);
      const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let [count, sum] = [0, 0];
      for (const row of rows) {
        if (!texts.has(row)) texts.set(row, row.textContent.toLowerCase());
        const isOf = (k, i) => !selects[i].value || row.cells[k].textContent.split(", ").includes(selects[i].value);
        row.hidden = !(wanted.every((word) => texts.get(row).includes(word)) && chosen.every(isOf));
        if (row.hidden) continue;
        count += 1;
        if (table.dataset.total) sum += Number(row.cells[table.dataset.total].dataset.v ?? 0);
      }
      const all = count === rows.length ? `${count} rows` : `${count} of ${rows.length} rows`;
      output.value = table.dataset.total ? `${all}; ${shownBytes(sum)} ${heads[table.dataset.total]}` : all;
    };
    for (const control of [search, ...selects]) control.addEventListener("input", update);
    table.closest(".pj-wide").before(make("div", { class: "pj-tools" }, search, ...selects, output));
    update();
  }

  // ---- the program

  function program(root, listing) {
    // The first line of an equation, with those of its other results.
    const groups = [];
    for (const line of listing.querySelectorAll(".pj-l")) {
      if (line.matches(".pj-more")) groups.at(-1).push(line);
      else groups.push([line]);
    }
    const folds = [...listing.querySelectorAll("details")];
    const initially = folds.map((fold) => fold.open);
    const search = make("input", { type: "search", placeholder: "search", "aria-label": "search in the program" });
    const kinds = { "": "all lines", ".pj-moves": "lines that move data", "em:not(.pj-moves)": "lines with findings" };
    const options = Object.entries(kinds).map(([value, text]) => new Option(text, value));
    const select = make("select", { "aria-label": "lines of the program" }, ...options);
    const output = make("output", { "aria-live": "polite" });
    const folding = ["fold all", "unfold all"].map((text, k) => {
      const button = make("button", { type: "button" }, text);
      button.addEventListener("click", () => folds.forEach((fold) => (fold.open = k === 1)));
      return button;
    });
    const texts = [];
    const update = () => {
      closeDetails(listing);
      const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const isAll = !wanted.length && !select.value;
      const needed = new Set();
      let count = 0;
      const matches = groups.map((lines, k) => {
        texts[k] ??= lines.map((line) => line.textContent).join(" ").toLowerCase();
        const isFound =
          wanted.every((word) => texts[k].includes(word)) &&
          (!select.value || lines.some((line) => line.querySelector(select.value)));
        if (!isFound) return false;
        count += 1;
        let fold = lines[0].closest("details");
        // The first line of a body stands in what folds, and need not be unfolded to be seen.
        if (fold && lines[0].parentElement.matches("summary")) {
          needed.add(fold.firstElementChild);
          fold = fold.parentElement.closest("details");
        }
        for (; fold && !needed.has(fold); fold = fold.parentElement.closest("details")) needed.add(fold);
        return true;
      });
      folds.forEach((fold, k) => {
        fold.open = isAll ? initially[k] : needed.has(fold);
        fold.hidden = !needed.has(fold) && !needed.has(fold.firstElementChild);
      });
      groups.forEach((lines, k) => {
        const isHead = lines[0].parentElement.matches("summary");
        for (const line of lines) line.hidden = !matches[k] && !isHead;
      });
      for (const chunk of listing.children) {
        const count = [...chunk.children].filter((child) => !child.hidden).length;
        chunk.hidden = !count;
        chunk.style.setProperty("--n", count);
      }
      output.value = isAll ? `${groups.length} lines` : `${count} of ${groups.length} lines`;
    };
    search.addEventListener("input", update);
    select.addEventListener("input", update);
    output.value = `${groups.length} lines`;
    const tools = folds.length ? [search, select, ...folding, output] : [search, select, output];
    listing.before(make("div", { class: "pj-tools" }, ...tools));

    // Where values are defined and used; a name is defined once in a program.
    let [defined, used] = [null, null];
    const look = () => {
      if (defined) return;
      [defined, used] = [new Map(), new Map()];
      for (const name of listing.querySelectorAll(".pj-l > span:first-child > b")) {
        const line = name.closest(".pj-l");
        if (!name.closest(".pj-alone")) defined.set(name.textContent, line);
      }
      for (const [line] of groups) {
        for (const word of new Set(words(line))) {
          if (defined.has(word)) used.set(word, [...(used.get(word) ?? []), line]);
        }
      }
    };
    const words = (line) => (line.querySelector(".pj-t")?.textContent ?? "").split(/\s+/);
    const goTo = (name) => {
      look();
      const line = defined.get(name);
      if (!line) return;
      if (!isVisible(line)) {
        [search.value, select.value] = ["", ""];
        update();
      }
      for (let fold = line.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
      listing.querySelector(".pj-here")?.classList.remove("pj-here");
      line.classList.add("pj-here");
      line.scrollIntoView({ block: "center" });
      line.querySelector("a")?.focus({ preventScroll: true });
    };
    const jump = (name) => {
      const button = make("button", { type: "button" }, name);
      button.addEventListener("click", () => goTo(name));
      return button;
    };
    const nameOf = (line) => line.querySelector("span:first-child:not(.pj-alone) > b")?.textContent;
    const around = (line) => {
      look();
      const [reads, own] = [[...new Set(words(line))].filter((word) => defined.has(word)), nameOf(line)];
      const readers = (used.get(own) ?? []).map(nameOf).filter((name) => defined.has(name));
      const parts = [];
      if (reads.length) parts.push("reads ", ...reads.slice(0, 20).flatMap((name) => [jump(name), " "]));
      if (readers.length) parts.push("is read by ", ...readers.slice(0, 20).flatMap((name) => [jump(name), " "]));
      return parts.length ? make("p", {}, ...parts) : null;
    };
    opens(root, listing, ".pj-l", around);
    return goTo;
  }

  // ---- a report

  function setUp(root) {
    for (const table of root.querySelectorAll("table.pj-rows")) {
      sortable(table);
      if (table.dataset.search !== undefined) filterable(table);
      opens(root, table, "tbody > tr:not(.pj-detail)");
    }
    const listing = root.querySelector(".pj-listing");
    const goTo = listing && program(root, listing);
    for (const found of root.querySelectorAll(".pj-findings")) {
      opens(root, found, "li");
      for (const item of found.querySelectorAll("li[data-value]")) {
        const button = make("button", { type: "button" }, `show ${item.dataset.value}`);
        button.addEventListener("click", () => goTo?.(item.dataset.value));
        item.firstElementChild.append(" ", button);
      }
    }
    const isWhole = root.dataset.whole !== undefined;
    (isWhole ? document : root).addEventListener("keydown", (event) => {
      const isTyped = event.target.matches?.("input, select, textarea, [contenteditable]");
      if (event.key !== "/" || isTyped || event.ctrlKey || event.metaKey || event.altKey) return;
      const boxes = [...root.querySelectorAll('input[type="search"]')].filter(isVisible);
      const section = event.target.closest?.(".pj-section");
      const box =
        boxes.find((box) => section?.contains(box)) ??
        boxes.find((box) => box.closest(".pj-section").getBoundingClientRect().bottom > 80);
      if (!box) return;
      event.preventDefault();
      box.focus();
    });
    if (isWhole) wholePage(root);
  }

  function wholePage(root) {
    const page = document.documentElement;
    const button = make("button", { type: "button", class: "pj-theme", "aria-label": "change between light and dark" }, "◐");
    button.addEventListener("click", () => {
      const isDark = page.dataset.theme ? page.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      page.dataset.theme = isDark ? "light" : "dark";
    });
    root.querySelector(".pj-top").append(button);
    // What is folded is not printed.
    let folded = [];
    addEventListener("beforeprint", () => {
      folded = [...root.querySelectorAll("details:not([open])")];
      for (const fold of folded) fold.open = true;
    });
    addEventListener("afterprint", () => {
      for (const fold of folded) fold.open = false;
    });
  }

  for (const root of document.querySelectorAll(".pj-report:not([data-ready])")) {
    root.dataset.ready = "";
    setUp(root);
  }
})();
