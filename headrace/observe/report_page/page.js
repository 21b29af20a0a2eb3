"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLOURS = 8;
  const UNITS = new Set(["nats", "s", "tokens", "tokens/s"]); // those that a title does not make plain
  const charts = []; // functions that draw a chart anew
  let smooth = true;

  // Everything below puts texts in place as text, never as markup.
  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }
  const namespace = document.querySelector("svg").namespaceURI; // spares the page an address
  function draw(parent, tag, attributes, text) {
    const node = document.createElementNS(namespace, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }

  // Numbers
  function threeDigits(value) {
    const size = Math.abs(value);
    return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 ? 2 : size >= 0.1 ? 3 : 4);
  }
  function short(value, unit) {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (unit === "fraction") return `${trim((100 * value).toFixed(size < 0.01 ? 2 : 1))}%`;
    if (unit === "bytes") {
      for (const [power, name] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]]) {
        if (size >= 0.9995 * 2 ** power) return `${threeDigits(value / 2 ** power)} ${name}`;
      }
      return `${value} B`;
    }
    let text;
    if (size < 0.001 || size >= 1e12) {
      text = value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
    } else {
      const [divisor, suffix] = size < 999.5 ? [1, ""] : size < 999.5e3 ? [1e3, "k"] : size < 999.5e6 ? [1e6, "M"] : [1e9, "G"];
      text = threeDigits(value / divisor) + suffix;
    }
    return unit === "s" ? `${text} s` : text;
  }
  const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
  function tickText(value, step, unit) {
    if (unit === "fraction") return `${trim((100 * value).toFixed(Math.max(0, Math.min(4, -Math.floor(Math.log10(100 * step) + 1e-9)))))}%`;
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1000) return trimUnit(short(value, ""));
    if (step < 0.0005) return value.toExponential(1).replace(".0e", "e");
    return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  }
  const trimUnit = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
  function linearTicks(low, high, wanted) {
    const rough = (high - low) / wanted;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-6); i * step <= high + step * 1e-6; i++) ticks.push(i * step);
    return { ticks, step };
  }
  function logTicks(low, high) {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    const every = Math.max(1, Math.ceil((to - from) / 5));
    const factors = to - from <= 2 ? [1, 2, 5] : [1];
    const ticks = [];
    for (let p = from; p <= to; p += every) {
      for (const f of factors) if (f * 10 ** p >= low * 0.999 && f * 10 ** p <= high * 1.001) ticks.push(f * 10 ** p);
    }
    return ticks;
  }
  function logText(value, unit) {
    if (unit === "fraction" || unit === "bytes") return trimUnit(short(value, unit));
    return value >= 0.001 && value < 1000 ? String(Number(value.toPrecision(2))) : trimUnit(value.toExponential(1).replace("e+", "e")).replace(".0e", "e");
  }
  /** Exponential moving average, of logarithms on a logarithmic axis, without the start's bias; a gap stays a gap. */
  function smoothed(values, log) {
    const keep = 1 - 1 / Math.max(4, values.length / 30);
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = keep * sum + (1 - keep) * (log ? Math.log(value) : value);
      weight = keep * weight + (1 - keep);
      return log ? Math.exp(sum / weight) : sum / weight;
    });
  }

  // One frame for all charts: axes, cross-hair and read-out. `plot` draws into it and returns what a step reads.
  function figure(parent, spec) {
    const node = make("figure", { class: `chart${spec.wide ? " wide" : ""}` });
    const caption = make("figcaption", { title: spec.meaning || null },
      make("span", { class: "name" }, spec.title), make("span", { class: "unit" }, spec.detail || ""));
    node.append(caption);
    if (spec.legend) node.append(legendOf(spec.legend));
    const svg = draw(node, "svg", { role: "img", tabindex: "0" });
    const tip = make("div", { class: "tip", hidden: true });
    node.append(tip);
    parent.append(node);
    let log = spec.log === true;
    if (spec.canLog) {
      const button = make("button", { class: "log", type: "button", "aria-pressed": String(log), title: "Logarithmic axis" }, "log");
      button.addEventListener("click", () => {
        log = !log;
        button.setAttribute("aria-pressed", String(log));
        render();
      });
      caption.append(button);
    }
    let frame = null, shown = null;
    function render() {
      const width = svg.clientWidth || node.clientWidth - 30;
      if (width < 40) return; // folded away
      hide();
      svg.replaceChildren();
      draw(svg, "title", {}, spec.summary);
      frame = axes(svg, spec, width, spec.height || 190, log);
      spec.plot(svg, frame);
    }
    function show(step) {
      if (!frame) return;
      hide();
      shown = nearest(spec.steps, step);
      const rows = spec.read(shown);
      const x = frame.x(shown);
      frame.marks = [draw(svg, "line", { class: "cross", x1: x, x2: x, y1: frame.top, y2: frame.bottom })];
      for (const row of rows) {
        if (row.at !== null && row.at !== undefined) {
          frame.marks.push(draw(svg, "circle", { class: `dot f${row.colour}`, cx: x, cy: frame.y(row.at), r: 4 }));
        }
      }
      tip.replaceChildren(make("p", { class: "step" }, `step ${shown}`), ...rows.map((row) =>
        make("p", {}, make("span", { class: `swatch s${row.colour}` }), row.name ? `${row.name} ` : "", make("b", {}, row.text))));
      tip.hidden = false;
      const outer = node.getBoundingClientRect(), inner = svg.getBoundingClientRect();
      const left = inner.left - outer.left + x, size = tip.offsetWidth + 14;
      tip.style.left = `${Math.max(4, left + size > node.clientWidth - 4 ? left - size : left + 14)}px`;
      tip.style.top = `${inner.top - outer.top + 6}px`;
    }
    function hide() {
      if (frame && frame.marks) for (const mark of frame.marks) mark.remove();
      tip.hidden = true;
    }
    svg.addEventListener("pointermove", (event) => show(frame ? frame.step(event.clientX - svg.getBoundingClientRect().left) : 0));
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move || !spec.steps.length) return;
      event.preventDefault();
      const at = shown === null ? (move > 0 ? -1 : spec.steps.length) : spec.steps.indexOf(shown);
      show(spec.steps[Math.max(0, Math.min(spec.steps.length - 1, at + move))]);
    });
    charts.push(render);
    render();
  }
  const legendOf = (names) => make("ul", { class: "legend" }, ...names.map((name, i) =>
    make("li", {}, make("span", { class: `swatch s${i % COLOURS}` }), name)));
  function nearest(sorted, value) {
    let low = 0, high = sorted.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (sorted[middle] <= value) low = middle; else high = middle;
    }
    return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? sorted[low] : sorted[high];
  }

  function axes(svg, spec, width, height, log) {
    let [low, high] = spec.range(log);
    const top = 8, bottom = height - 24;
    let ticks, label;
    if (log) {
      ticks = logTicks(low, high);
      if (ticks.length < 2) ticks = [low, high];
      label = (v) => logText(v, spec.unit);
    } else {
      if (low === high) {
        const room = Math.abs(low) > 0 ? Math.abs(low) * 0.1 : 1;
        [low, high] = [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
      }
      const power = spec.unit === "bytes" ? Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(high, 1)) / 10))) : 0;
      const scale = 1024 ** power; // bytes get round numbers of their own unit
      const found = linearTicks(low / scale, high / scale, 5);
      ticks = found.ticks.map((t) => t * scale);
      label = (v) => tickText(Math.abs(v / scale) < found.step * 1e-9 ? 0 : v / scale, found.step, spec.unit)
        + (spec.unit === "bytes" ? ` ${["B", "KiB", "MiB", "GiB", "TiB"][power]}` : "");
      const pad = (high - low) * 0.04;
      low = low >= 0 ? Math.max(0, low - pad) : low - pad;
      high = spec.unit === "fraction" && high <= 1 ? Math.min(1, high + pad) : high + pad;
    }
    const labels = ticks.map(label);
    const left = Math.max(...labels.map((text) => text.length), 1) * 6.6 + 10;
    const right = width - 10;
    const [first, last] = [spec.steps[0], spec.steps[spec.steps.length - 1]];
    const span = last - first || 1;
    const place = log ? Math.log : (v) => v;
    const [from, to] = [place(low), place(high)];
    const x = (step) => left + ((step - first) / span) * (right - left);
    const y = (value) => bottom - ((place(value) - from) / (to - from || 1)) * (bottom - top);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    ticks.forEach((tick, i) => {
      draw(svg, "line", { class: "rule", x1: left, x2: right, y1: y(tick), y2: y(tick) });
      draw(svg, "text", { class: "tick", x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, labels[i]);
    });
    draw(svg, "line", { class: "rule", x1: left, x2: right, y1: bottom, y2: bottom });
    const wanted = Math.max(2, Math.floor((right - left) / 64));
    const steps = linearTicks(first, last === first ? first + 1 : last, wanted).ticks.filter((t) => Number.isInteger(t) && t <= last);
    for (const step of steps) {
      const text = step >= 10000 ? short(step) : String(step);
      const at = Math.min(x(step), width - text.length * 3.4);
      draw(svg, "text", { class: "tick", x: at, y: height - 7, "text-anchor": "middle" }, text);
    }
    return { x, y, top, bottom, left, right, log, step: (px) => first + ((px - left) / (right - left)) * span, marks: null };
  }

  function curveChart(parent, chart) {
    const lines = chart.lines.map((line) => {
      const finite = line.y.filter((v) => v !== null);
      return { ...line, finite, at: new Map(line.x.map((step, i) => [step, i])), noisy: finite.length >= 40 && chart.noisy, soft: null };
    });
    const every = lines.flatMap((line) => line.finite);
    const [low, high] = [every.reduce((a, b) => Math.min(a, b)), every.reduce((a, b) => Math.max(a, b))];
    const ends = lines.map((line, i) => line.finite.length
      ? `${data.runs[i]}: from ${short(line.finite[0], chart.unit)} to ${short(line.finite[line.finite.length - 1], chart.unit)}` : null);
    figure(parent, {
      title: chart.title,
      detail: UNITS.has(chart.unit) ? `${chart.metric}, ${chart.unit}` : chart.metric,
      meaning: chart.meaning,
      summary: `${chart.title}. ${ends.filter(Boolean).join("; ")}`,
      unit: chart.unit,
      canLog: low > 0 && high / low > 20,
      log: low > 0 && high / low > 1000,
      steps: [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b),
      // an outlier of the raw values must not flatten the curve that is looked at, so the axis covers both
      range: () => [low, high],
      plot(svg, frame) {
        lines.forEach((line, i) => {
          const soft = line.soft = smooth && line.noisy ? smoothed(line.y, frame.log) : null;
          if (soft) draw(svg, "path", { class: `curve raw k${i % COLOURS}`, d: path(line.x, line.y, frame) });
          draw(svg, "path", { class: `curve k${i % COLOURS}`, d: path(line.x, soft || line.y, frame) });
          if (line.finite.length <= 25) {
            line.y.forEach((v, j) => {
              if (v !== null) draw(svg, "circle", { class: `dot f${i % COLOURS}`, cx: frame.x(line.x[j]), cy: frame.y(v), r: 3.5 });
            });
          }
        });
      },
      read: (step) => lines.flatMap((line, i) => {
        const j = line.at.get(step);
        if (j === undefined) return [];
        const value = line.y[j], soft = line.soft ? line.soft[j] : null;
        const text = value === null ? "not finite" : short(value, chart.unit) + (soft !== null ? ` (smooth ${short(soft, chart.unit)})` : "");
        return [{ colour: i % COLOURS, name: data.runs.length > 1 ? data.runs[i] : "", text, at: soft !== null ? soft : value }];
      }),
    });
  }
  /** A line through the values; it is broken where a value is not finite. */
  function path(xs, ys, frame) {
    let out = "", pen = "M";
    ys.forEach((value, i) => {
      if (value === null) { pen = "M"; return; }
      out += `${pen}${frame.x(xs[i]).toFixed(1)} ${frame.y(value).toFixed(1)}`;
      pen = "L";
    });
    return out;
  }

  function stageAreas(parent, stages) {
    const names = Object.keys(stages.seconds);
    const tops = names.map(() => stages.steps.map(() => 0));
    stages.steps.forEach((_, j) => names.reduce((sum, name, i) => (tops[i][j] = sum + stages.seconds[name][j]), 0));
    const total = tops[tops.length - 1];
    figure(parent, {
      title: "Time of each stage", detail: "seconds a step, stacked", wide: true, unit: "s", height: 220,
      summary: `Time of each stage. ${names.map((n) => `${n} ${short(mean(stages.seconds[n]), "s")}`).join(", ")} a step on average`,
      legend: names, steps: stages.steps, range: () => [0, Math.max(...total)],
      plot(svg, frame) {
        names.forEach((name, i) => {
          const up = tops[i].map((v, j) => `${frame.x(stages.steps[j]).toFixed(1)} ${frame.y(v).toFixed(1)}`);
          const below = stages.steps.map((s, j) => `${frame.x(s).toFixed(1)} ${frame.y(i ? tops[i - 1][j] : 0).toFixed(1)}`).reverse();
          draw(svg, "path", { class: `area f${i % COLOURS}`, d: `M${up.join("L")}L${below.join("L")}Z` });
        });
      },
      read(step) {
        const j = stages.steps.indexOf(step);
        return names.map((name, i) => ({ colour: i % COLOURS, name, text: short(stages.seconds[name][j], "s") }));
      },
    });
  }
  const mean = (values) => values.reduce((a, b) => a + b, 0) / Math.max(1, values.length);

  function stageBars(parent, stages) {
    const names = [...new Set(stages.flatMap((s) => Object.keys(s.seconds)))];
    const bars = stages.map((s) => names.map((name) => (s.seconds[name] ? mean(s.seconds[name]) : 0)));
    const longest = Math.max(...bars.map((bar) => bar.reduce((a, b) => a + b, 0)));
    if (!(longest > 0)) return;
    const node = make("figure", { class: "chart wide" }, make("figcaption", {},
      make("span", { class: "name" }, "Time of each stage"), make("span", { class: "unit" }, "mean seconds a step")), legendOf(names));
    const svg = draw(node, "svg", { role: "img" });
    parent.append(node);
    const render = () => {
      const width = svg.clientWidth || node.clientWidth - 30;
      if (width < 40) return;
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${bars.length * 46}`);
      svg.setAttribute("height", bars.length * 46);
      draw(svg, "title", {}, `Time of each stage. ${bars.map((bar, i) => `${data.runs[i]}: ${names.map((n, k) => `${n} ${short(bar[k], "s")}`).join(", ")}`).join("; ")}`);
      bars.forEach((bar, i) => {
        const total = bar.reduce((a, b) => a + b, 0);
        draw(svg, "text", { class: "tick", x: 0, y: i * 46 + 12 }, `${data.runs[i]}: ${short(total, "s")}`);
        let x = 0;
        bar.forEach((seconds, k) => {
          const size = (seconds / longest) * width;
          const part = draw(svg, "rect", { class: `area f${k % COLOURS}`, x, y: i * 46 + 18, width: Math.max(0, size), height: 20 });
          draw(part, "title", {}, `${names[k]}: ${short(seconds, "s")}`);
          x += size;
        });
      });
    };
    charts.push(render);
    render();
  }

  function showCharts() {
    const place = document.getElementById("charts");
    const timed = data.stages.filter((s) => Object.keys(s.seconds).length && s.steps.length);
    const speed = data.sections.find((s) => s.title === "Speed and memory");
    if (!data.sections.length) return;
    place.replaceChildren();
    for (const section of data.sections) {
      const grid = make("div", { class: "grid" });
      if (section.folded) {
        const fold = make("details", {}, make("summary", {}, `${section.title} (${section.charts.length})`), grid);
        fold.addEventListener("toggle", () => charts.forEach((render) => render()));
        place.append(fold);
      } else {
        place.append(make("h3", {}, section.title), grid);
      }
      for (const chart of section.charts) curveChart(grid, chart);
      if (section === speed && timed.length) {
        if (data.runs.length === 1 && timed[0].steps.length > 1) stageAreas(grid, timed[0]);
        else stageBars(grid, data.stages);
      }
    }
    document.getElementById("curve-controls").hidden = false;
    if (data.runs.length > 1) document.getElementById("legend").append(...legendOf(data.runs).children);
    document.getElementById("smooth").addEventListener("change", (event) => {
      smooth = event.target.checked;
      charts.forEach((render) => render());
    });
    let waiting = 0, width = window.innerWidth;
    window.addEventListener("resize", () => {
      if (window.innerWidth === width) return;
      width = window.innerWidth;
      clearTimeout(waiting);
      waiting = setTimeout(() => charts.forEach((render) => render()), 80);
    });
  }

  // The timeline's pictures are in the page; a button shows those of another step.
  function chooseSteps() {
    const place = document.getElementById("timeline-controls");
    if (!place) return;
    const buttons = [...place.children];
    for (const button of buttons) {
      button.addEventListener("click", () => {
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
        for (const picture of document.querySelectorAll(".picture")) picture.hidden = picture.dataset.choice !== button.dataset.choice;
      });
    }
    place.hidden = false;
  }

  // Samples: one set, or two beside each other matched by prompt and index
  const PAGE = 8;
  function nameOf(set) {
    const alone = data.sets.filter((s) => s.run === set.run && s.kind === "evaluation").length === 1;
    const when = set.step > 0 ? `after step ${set.step}` : alone ? "evaluation" : "before training";
    const what = set.kind === "training" ? `training, step ${set.step}` : when;
    return data.runs.length > 1 ? `${data.runs[set.run]}: ${what}` : what;
  }
  function showSamples() {
    const place = document.getElementById("browser");
    if (!data.sets.length) return;
    const evaluations = data.sets.map((set, i) => ({ ...set, i })).filter((set) => set.kind === "evaluation");
    let left = 0, right = -1;
    const last = data.runs.map((_, run) => evaluations.filter((s) => s.run === run).pop()).filter(Boolean);
    if (last.length > 1) {
      [left, right] = [last[0].i, last[1].i];
    } else if (evaluations.length > 1) {
      [left, right] = [evaluations[0].i, evaluations[evaluations.length - 1].i];
    } else if (!evaluations.length) {
      left = data.sets.length - 1;
    }
    let page = 0, filter = "all", search = "";
    const options = () => data.sets.map((set, i) => make("option", { value: i }, nameOf(set)));
    const leftSelect = make("select", {}, ...options());
    const rightSelect = make("select", {}, make("option", { value: -1 }, "nothing"), ...options());
    const searchBox = make("input", { type: "search", placeholder: "Search", "aria-label": "Search prompts and responses" });
    const filters = make("span", { class: "buttons", role: "group", "aria-label": "Which samples" });
    const list = make("div", {});
    const pages = make("div", { class: "pages" });
    const previous = make("button", { type: "button" }, "Previous");
    const next = make("button", { type: "button" }, "Next");
    const where = make("span", { "aria-live": "polite" });
    pages.append(previous, next, where);
    place.replaceChildren(make("div", { class: "pick" }, make("label", {}, "Show", leftSelect),
      data.sets.length > 1 ? make("label", {}, "beside", rightSelect) : null, searchBox, filters), list, pages);
    leftSelect.value = left;
    rightSelect.value = right;

    const key = (s) => `${s.prompt_id}/${s.sample_index}/${s.prompt}`;
    function pairs() {
      const other = right < 0 ? null : new Map(data.sets[right].samples.map((s) => [key(s), s]));
      const all = data.sets[left].samples.map((s) => [s, other ? other.get(key(s)) || null : null]);
      // nothing in common (training steps have prompts of their own): below each other instead of beside
      return other && all.every(([, b]) => b === null) ? [...all, ...data.sets[right].samples.map((s) => [null, s])] : all;
    }
    const change = ([a, b]) => (a && b && a.reward !== null && b.reward !== null ? Math.sign(b.reward - a.reward) : null);
    const tests = {
      all: () => true,
      better: (pair) => change(pair) === 1,
      worse: (pair) => change(pair) === -1,
      same: (pair) => change(pair) === 0,
      right: ([a]) => a && a.reward !== null && a.reward >= 1,
      wrong: ([a]) => a && a.reward !== null && a.reward < 1,
    };
    function update() {
      const found = pairs();
      const kinds = found.some((pair) => change(pair) !== null) ? ["all", "better", "worse", "same"] : ["all", "right", "wrong"];
      if (!kinds.includes(filter)) filter = "all";
      filters.replaceChildren(...kinds.map((kind) => {
        const names = { right: "reward ≥ 1", wrong: "reward < 1" };
        const button = make("button", { type: "button", "aria-pressed": String(kind === filter) }, `${names[kind] || kind} (${found.filter(tests[kind]).length})`);
        button.addEventListener("click", () => { filter = kind; page = 0; update(); });
        return button;
      }));
      const needle = search.toLowerCase();
      const kept = found.filter(tests[filter]).filter((pair) => !needle || pair.some((s) => s && `${s.prompt}\n${s.completion}`.toLowerCase().includes(needle)));
      const last = Math.max(0, Math.ceil(kept.length / PAGE) - 1);
      page = Math.min(page, last);
      const part = kept.slice(page * PAGE, (page + 1) * PAGE);
      list.replaceChildren(...part.map(card));
      if (!kept.length) list.append(make("p", { class: "note" }, "No sample is like that."));
      where.textContent = kept.length ? `${page * PAGE + 1}–${page * PAGE + part.length} of ${kept.length}` : "";
      previous.disabled = page === 0;
      next.disabled = page >= last;
      pages.hidden = kept.length <= PAGE;
    }
    function card(pair) {
      const [a, b] = pair;
      const sides = [[a, left], [b, right]].filter(([s]) => s).map(([s, set]) => side(s, nameOf(data.sets[set])));
      return make("article", { class: "sample" },
        make("div", { class: `prompt${/^[^\n]{0,90}$/.test((a || b).prompt) ? " brief" : ""}` }, make("p", { class: "label" }, "Prompt"), make("p", { class: "text", dir: "auto" }, (a || b).prompt)),
        make("div", { class: "pair" }, ...sides));
    }
    function side(sample, name) {
      const reward = sample.reward;
      const chips = make("p", { class: "label" }, make("span", {}, name),
        make("span", { class: `chip${reward === null ? "" : reward >= 1 ? " good" : reward <= 0 ? " bad" : ""}` }, reward === null ? "no reward" : `reward ${short(reward, "")}`),
        sample.num_tokens === null ? null : make("span", {}, `${sample.num_tokens} tokens`),
        sample.finish_reason === "length" ? make("span", {}, "cut at the limit") : null);
      return make("div", { class: "side" }, chips, make("p", { class: "text", dir: "auto" }, sample.completion || "(empty)"));
    }
    leftSelect.addEventListener("change", () => { left = Number(leftSelect.value); page = 0; update(); });
    rightSelect.addEventListener("change", () => { right = Number(rightSelect.value); page = 0; update(); });
    searchBox.addEventListener("input", () => { search = searchBox.value; page = 0; update(); });
    previous.addEventListener("click", () => { page -= 1; update(); });
    next.addEventListener("click", () => { page += 1; update(); });
    update();
  }

  showCharts();
  chooseSteps();
  showSamples();
})();
