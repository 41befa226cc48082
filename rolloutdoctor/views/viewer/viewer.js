// The local page of a run: run, step, group. Text of the run reaches the page by textContent alone.
"use strict";

const state = { overview: null, judged: null, zoom: null, colour: "gradient", sort: "finding", fix: null, step: null, against: false, smooth: false, find: "", least: "", most: "" };
const main = document.getElementById("main");
const tip = document.body.appendChild(element("div", { id: "tip" }));

// Elements and numbers.

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) made.append(child instanceof Node ? child : String(child));
  }
  return made;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "n/a";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(digits - 1).replace(/\.?0+e/, "e");
  return Number(value.toPrecision(digits)).toString();
}

// Words of the report, in which backticks enclose what is typed.
const prose = (words) => words.split("`").map((part, at) => (at % 2 ? element("code", {}, part) : part));

const percent = (share) => (share === null ? "n/a" : `${number(100 * share)} %`);

// Data: from the server, or from the page itself where it was shared.

const embedded = document.getElementById("rolloutdoctor-data");
const shared = embedded === null ? null : JSON.parse(embedded.textContent);

async function load(path) {
  if (shared !== null) {
    if (path in shared) return shared[path];
    throw new Error("this shared page does not hold it; open the run with rolloutdoctor view");
  }
  const answer = await fetch(`api/${path}`);
  if (answer.status === 202) return { pending: await answer.json() };
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.problem);
  return body;
}

const withFix = () => (state.fix === null ? "" : `&fix=${encodeURIComponent(state.fix)}`);
const stepPath = (step, split) => `step?step=${step}&split=${split}${withFix()}`;
const groupPath = (step, split, group) => `${state.against ? "against" : "group"}?step=${step}&split=${split}&group=${encodeURIComponent(group)}${withFix()}`;

const CHANGE = "change of |gradient|";
const BEFORE = "gradient", AFTER = "gradient with the fix";

// What tokens are coloured by unless something else was chosen.
const usual = () => (state.fix === null ? BEFORE : CHANGE);

// Addresses: #/, #/step/46, #/step/46/eval, #/step/46/train/group/45-0?colour=gap&fix=zero-std, #/step/46/group/45-0?against

function address(step, split, group) {
  const options = new URLSearchParams();
  if (group !== undefined && state.colour !== usual()) options.set("colour", state.colour);
  if (state.fix !== null) options.set("fix", state.fix);
  if (state.against) options.set("against", "");
  const place = step === undefined ? "" : `step/${step}/${split}${group === undefined ? "" : `/group/${encodeURIComponent(group)}`}`;
  return `#/${place}${options.size ? `?${options}`.replace(/against=$/, "against") : ""}`;
}

function parsed() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const options = new URLSearchParams(query ?? "");
  state.fix = options.get("fix");
  state.against = options.has("against");
  state.colour = options.get("colour") ?? usual();
  const [kind, step, ...rest] = path.split("/");
  if (kind !== "step" || !/^\d+$/.test(step ?? "")) return {};
  const split = rest[0] === "eval" ? "eval" : "train";
  if (rest[0] === "eval" || rest[0] === "train") rest.shift();
  return { step: Number(step), split, group: rest[0] === "group" ? decodeURIComponent(rest.slice(1).join("/")) : undefined };
}

let turn = 0;

async function show() {
  const own = ++turn;
  const { step, split, group } = parsed();
  tip.textContent = "";
  try {
    if (state.overview === null) state.overview = await load("overview");
    if (state.overview.against === null) state.against = false;
    let page;
    if (step === undefined) page = runPage();
    else if (group === undefined) page = stepPage(await load(stepPath(step, split)));
    else {
      const [found, around] = [await load(groupPath(step, split, group)), await neighbours(step, split)];
      page = state.against ? againstPage(found, around) : groupPage(found, around);
    }
    if (own !== turn) return;
    crumbs(step, split, group);
    main.replaceChildren(page);
    if (step === undefined) drawCharts();
  } catch (error) {
    if (own !== turn) return;
    crumbs(step, split, group);
    main.replaceChildren(element("p", { role: "alert" }, error.message));
  }
}

async function neighbours(step, split) {
  if (state.step === null || state.step.step !== step || state.step.split !== split) {
    try { state.step = await load(stepPath(step, split)); } catch { state.step = null; }
  }
  return state.step === null ? [] : sorted(state.step).map((line) => line.group_id);
}

function crumbs(step, split, group) {
  const line = document.getElementById("crumbs");
  const run = state.overview;
  const parts = [element("a", { href: address() }, run === null ? "run" : run.name)];
  if (step !== undefined) parts.push("/ ", element("a", { href: address(step, split) }, `step ${step}${split === "eval" ? " (eval)" : ""}`));
  if (group !== undefined) parts.push("/ ", element("span", {}, `group ${group}`));
  line.replaceChildren(...parts);
  document.body.classList.toggle("within", step !== undefined);
  document.title = `${group !== undefined ? `group ${group}, ` : ""}${step !== undefined ? `step ${step}, ` : ""}${run?.name ?? "rolloutdoctor"}`;
}

// The check of the whole run goes on beside the page.

async function judge() {
  try {
    const found = await load("judged");
    const verdict = document.getElementById("verdict"), progress = document.getElementById("progress");
    if ("pending" in found) {
      verdict.textContent = "Steps and groups can be looked at while the run is checked.";
      progress.textContent = `Checking the run: ${found.pending.words}`;
      setTimeout(judge, 700);
      return;
    }
    state.judged = found;
    verdict.replaceChildren(...prose(found.verdict));
    verdict.className = found.verdict.startsWith("Healthy") ? "healthy" : found.findings[0]?.severity ?? "";
    state.overview ??= await load("overview");
    progress.textContent = `${found.likely_trainers.length && found.likely_trainers.length <= 3 ? `${found.likely_trainers.join(" or ")} (inferred from metric names)` : state.overview.trainer}; ${found.coverage.tested} of ${found.coverage.rules} rules tested`;
    show();
  } catch (error) {
    document.getElementById("verdict").textContent = "The run could not be checked.";
    document.getElementById("progress").textContent = error.message;
  }
}

// Run.

function runPage() {
  const run = state.overview, page = element("div");
  page.append(stepChooser(run));
  if (run.vitals.length) {
    page.append(element("h2", {}, "What the trainer logged"));
    page.append(element("p", { class: "soft" }, "One cursor for all; drag to zoom, double-click for the whole run, click for the step."));
    page.append(smoothing());
    page.append(element("div", { class: "charts", id: "vitals" }));
  }
  if (state.judged === null) return page;
  const compared = state.judged.compared;
  if (compared.length) {
    const odd = compared.filter((one) => one.agrees.includes(false));
    page.append(element("h2", {}, "Logged and recomputed"));
    page.append(element("p", { class: "soft" }, odd.length
      ? `${odd.length} of ${compared.length} metrics disagree in some step: the line is as logged, dots are as recomputed, shaded steps disagree.`
      : `All of ${compared.length} metrics are reproduced from the rollouts and options.`));
    page.append(element("div", { class: "charts", id: "compared" }));
  }
  page.append(element("h2", {}, "Findings"));
  if (!state.judged.findings.length) page.append(element("p", {}, "No fault was found."));
  for (const one of state.judged.findings) page.append(finding(one));
  return page;
}

function stepChooser(run) {
  const count = run.steps.length;
  if (!count) return element("p", { class: "soft" }, "This run has no rows: its log is all there is to see.");
  const [first, last] = [run.steps[0][0], run.steps[count - 1][0]];
  const field = element("input", { type: "number", min: first, max: last, value: first, "aria-label": "step" });
  const go = (event) => {
    event.preventDefault();
    const split = run.steps.some(([step, part]) => step === Number(field.value) && part === "train") ? "train" : "eval";
    location.hash = address(Number(field.value), split);
  };
  const rows = run.steps.reduce((sum, one) => sum + one[2], 0);
  return element("form", { class: "tools", onsubmit: go }, element("label", {}, "Step ", field), element("button", {}, "Show"),
    element("span", { class: "soft" }, `${number(rows)} responses in ${number(count)} steps, ${first} to ${last}`));
}

const placeWords = (place) => `step ${place.step}${place.group_id === null ? "" : `, group ${place.group_id}`}`;

function finding(one) {
  const different = [...new Map(one.examples.map((place) => [placeWords(place), place])).values()];
  const places = different.slice(0, 5).map((place) => {
    const words = placeWords(place);
    const split = state.overview.steps.some(([step, part]) => step === place.step && part === "train") ? "train" : "eval";
    return element("a", { href: address(place.step, split, place.group_id ?? undefined), title: place.note }, words);
  });
  return element("div", { class: `finding ${one.severity}${one.follows_from ? " consequence" : ""}` },
    element("p", {}, element("span", { class: "code" }, `${one.code} `), prose(`${one.headline}${one.follows_from ? ` (follows from ${one.follows_from})` : ""}`)),
    element("p", { class: "soft" }, prose(`Evidence: ${one.evidence}`)),
    element("p", { class: "soft" }, prose(`Advice: ${one.advice}`)),
    places.length && state.overview.steps.length ? element("p", { class: "places" }, places) : null);
}

// Where findings about a quantity begin, with the first clause of what they say.
const clauseOf = (headline) => { const said = headline.split(/, so |, while |; |: /)[0]; return said.length > 44 ? `${said.slice(0, 43)}\u2026` : said; };
const marksOf = (name) => (state.judged?.marks[name] ?? []).map(([step, code]) => [step, clauseOf(state.judged.findings.find((one) => one.code === code)?.headline ?? code)]);

function smoothing() {
  const choose = (event) => { state.smooth = event.target.checked; show(); };
  return element("label", { class: "tools" }, element("input", { id: "smooth", type: "checkbox", onchange: choose, checked: state.smooth ? "" : null }),
    `Smooth: mean of ${WINDOW} logged steps`);
}

const WINDOW = 11;

// Means of the known values around each, as many on both sides.
function smoothed(series) {
  const half = (WINDOW - 1) / 2;
  return series.map((own, at) => {
    const side = Math.min(half, at, series.length - 1 - at);
    const known = series.slice(at - side, at + side + 1).filter((value) => value !== null);
    return own === null ? null : known.reduce((sum, value) => sum + value, 0) / known.length;
  });
}

function drawCharts() {
  const vitals = document.getElementById("vitals"), compared = document.getElementById("compared");
  for (const one of vitals === null ? [] : state.overview.vitals) {
    chart(vitals, one.title, one.steps, [one.series], marksOf(one.name), one.unit);
  }
  for (const one of compared === null ? [] : state.judged.compared.filter((each) => each.agrees.includes(false)).slice(0, 12)) {
    chart(compared, one.metric, one.steps, [one.logged, one.recomputed], [], "", one.agrees);
  }
}

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rgb = (name, alpha) => `rgb(${ink(name)} / ${alpha})`;
const charts = new Set();

function chart(parent, title, steps, series, marks, unit, agrees = null) {
  const value = element("span", { class: "value" }, `${number(series[0][0])} → ${number(series[0].at(-1))}`);
  const box = element("div", { class: "chart" }, element("h3", {}, title, value));
  parent.append(box);
  const rest = value.textContent;
  const smooth = state.smooth && agrees === null;
  const lines = [{ stroke: rgb("--up", smooth ? 0.35 : 1), width: smooth ? 1 : 1.5, points: { show: false } }];
  if (smooth) lines.push({ stroke: rgb("--up", 1), width: 2, points: { show: false } });
  if (series.length > 1) lines.push({ stroke: rgb("--down", 1), width: 0, points: { show: true, size: 4, fill: rgb("--down", 1) } });
  const drawn = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    if (agrees !== null) {
      ctx.fillStyle = rgb("--down", 0.14);
      const half = Math.max(2, bbox.width / Math.max(2, 2 * steps.length));
      agrees.forEach((fits, at) => { if (!fits) ctx.fillRect(plot.valToPos(steps[at], "x", true) - half, bbox.top, 2 * half, bbox.height); });
    }
    ctx.strokeStyle = rgb("--down", 1);
    ctx.fillStyle = ink("--ink");
    ctx.setLineDash([4, 4]);
    marks.forEach(([step, name], line) => {
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) return;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      ctx.textAlign = x > bbox.left + bbox.width * 0.7 ? "right" : "left";
      // Below each other: several may begin at one step.
      const top = bbox.top + 13 * line * devicePixelRatio, wide = ctx.measureText(` ${name} `).width;
      ctx.fillStyle = ink("--card");
      ctx.fillRect(ctx.textAlign === "right" ? x - wide : x + devicePixelRatio, top, wide, 15 * devicePixelRatio);
      ctx.fillStyle = ink("--ink");
      ctx.fillText(` ${name} `, x, top + 12 * devicePixelRatio);
    });
    ctx.restore();
  };
  const whole = [steps[0], steps.at(-1)];
  const flat = (low, high) => (low === high ? [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10] : uPlot.rangeNum(low, high, 0.1, true));
  const axis = { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line") }, font: "11px system-ui" };
  const plot = new uPlot({
    width: box.clientWidth - 16, height: 130, legend: { show: false },
    scales: { x: { time: false, range: (own, low, high) => state.zoom ?? (whole[0] < whole[1] ? [low, high] : [low - 1, high + 1]) }, y: { range: (own, low, high) => flat(low ?? 0, high ?? 0) } },
    cursor: { sync: { key: "run" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
    axes: [{ ...axis, size: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5] },
      { ...axis, size: 52, values: (own, ticks) => ticks.map((tick) => number(tick)) }],
    series: [{}, ...lines],
    hooks: {
      draw: [drawn],
      setCursor: [(own) => {
        const at = own.cursor.idx;
        value.textContent = at === null || at === undefined ? rest
          : `step ${steps[at]}: ${series.map((each) => number(each[at])).join(" logged, ")}${series.length > 1 ? " recomputed" : ` ${unit === "1" ? "" : unit ?? ""}`}`;
      }],
      setSelect: [(own) => {
        if (own.select.width < 8) return;
        zoom([own.posToVal(own.select.left, "x"), own.posToVal(own.select.left + own.select.width, "x")]);
        own.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }],
    },
  }, [steps, ...series, ...(smooth ? [smoothed(series[0])] : [])], box);
  plot.over.addEventListener("dblclick", () => zoom(null));
  plot.over.addEventListener("click", () => {
    const at = plot.cursor.idx;
    if (at === null || at === undefined || plot.moved) return;
    if (state.overview.steps.some(([step, split]) => step === steps[at] && split === "train")) location.hash = address(steps[at], "train");
  });
  let pressed = 0;
  plot.over.addEventListener("mousedown", (event) => { pressed = event.clientX; plot.moved = false; });
  plot.over.addEventListener("mouseup", (event) => { plot.moved = Math.abs(event.clientX - pressed) > 4; });
  charts.add(plot);
}

function zoom(range) {
  state.zoom = range;
  for (const plot of charts) {
    if (!plot.root.isConnected) { charts.delete(plot); continue; }
    const steps = plot.data[0];
    plot.setScale("x", range === null ? { min: steps[0], max: steps.at(-1) } : { min: range[0], max: range[1] });
  }
}

addEventListener("resize", () => {
  for (const plot of charts) {
    if (plot.root.isConnected) plot.setSize({ width: plot.root.parentElement.clientWidth - 16, height: 130 });
    else charts.delete(plot);
  }
});

// Step.

function codesAt(step, group) {
  const found = new Map();
  for (const one of state.judged?.findings ?? []) {
    if (one.examples.some((place) => place.step === step && (place.group_id ?? group) === group && place.group_id !== null)) found.set(one.code, one.severity);
  }
  return found;
}

const RANK = { error: 3, warning: 2, info: 1 };

function sorted(page) {
  const rank = (line) => Math.max(0, ...[...codesAt(page.step, line.group_id).values()].map((one) => RANK[one]));
  const keys = {
    finding: (line) => [-rank(line), -(line.change ?? 0), -(line.gradient ?? 0)],
    gradient: (line) => [-(line.gradient ?? 0)],
    change: (line) => [-(line.change ?? 0)],
    spread: (line) => [-(line.spread ?? 0)],
    tokens: (line) => [-line.tokens],
    file: () => [0],
  };
  const key = keys[state.sort] ?? keys.finding;
  return page.groups.map((line) => [key(line), line])
    .sort(([a], [b]) => a.map((value, at) => value - b[at]).find((value) => value) ?? 0).map(([, line]) => line);
}

function fixChooser() {
  const choose = (event) => {
    const { step, split, group } = parsed(), unchosen = state.colour === usual();
    state.fix = event.target.value || null;
    if (unchosen) state.colour = usual();
    state.step = null;
    location.hash = address(step, split, group);
  };
  return element("label", {}, "With the fix ", element("select", { onchange: choose },
    element("option", { value: "" }, "none"),
    state.overview.fixes.map((name) => element("option", { value: name, selected: name === state.fix ? "" : null }, name))));
}

function command(words) {
  if (words === null) return null;
  const button = element("button", { onclick: async () => {
    try { await navigator.clipboard.writeText(words); button.textContent = "Copied"; } catch { button.replaceWith(element("code", {}, words)); }
  }, title: words }, "Copy as command");
  return button;
}

const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
const runWords = () => state.overview.paths.map(quoted).join(" ");

function stepPage(page) {
  state.step = page;
  const head = (key, words, kind = "") => element("th", { class: kind }, element("button", { onclick: () => { state.sort = key; show(); }, "aria-pressed": state.sort === key }, words));
  const verb = state.fix === null ? "export --what tokens" : `diff --fix ${quoted(state.fix)}`;
  const [name, ...rest] = verb.split(" ");
  const words = `rolloutdoctor ${name} ${runWords()} --steps ${page.step}:${page.step + 1}${rest.length ? ` ${rest.join(" ")}` : ""}`;
  const rewards = page.groups.flatMap((line) => line.rewards).filter((value) => value !== null);
  const range = [Math.min(...rewards), Math.max(...rewards)];
  const largest = Math.max(...page.groups.map((line) => line.gradient ?? 0), 1e-12);
  const nodes = new Map(sorted(page).map((line) => [line, element("tr", { onclick: () => { location.hash = address(page.step, page.split, line.group_id); } },
    element("td", {}, element("a", { href: address(page.step, page.split, line.group_id) }, line.group_id)),
    element("td", {}, element("div", { class: "prompt", title: line.prompt ?? "" }, line.prompt ?? "")),
    element("td", {}, dots(line.rewards, range)),
    element("td", { class: "number wide" }, number(line.spread)),
    element("td", { class: "number" }, percent(line.gradient), bar((line.gradient ?? 0) / largest)),
    state.fix === null ? null : element("td", { class: "number" }, percent(line.change)),
    element("td", { class: "number wide" }, number(line.tokens)),
    element("td", {}, [...codesAt(page.step, line.group_id)].map(([code, severity]) => element("span", { class: `flag ${severity}` }, code)),
      line.flags.map((flag) => element("span", { class: "flag" }, flag))))]));
  return element("div", {},
    element("div", { class: "tools" }, fixChooser(), command(words)),
    filters(page.groups.map((line) => ({ node: nodes.get(line), text: `${line.group_id} ${line.prompt ?? ""}`, rewards: line.rewards })), "groups"),
    page.problem ? element("p", { role: "alert" }, `The loss is not recomputed: ${page.problem}`) : null,
    element("h2", {}, `${number(page.groups.length)} groups`),
    element("div", { class: "scroll" }, element("table", {},
      element("thead", {}, element("tr", {}, head("file", "group"), element("th", {}, "prompt"), element("th", {}, "rewards"),
        head("spread", "reward std", "number wide"), head("gradient", "share of the log-prob gradient", "number"),
        state.fix === null ? null : head("change", "changed by the fix", "number"), head("tokens", "trained tokens", "number wide"), head("finding", "findings"))),
      element("tbody", {}, [...nodes.values()]))),
    element("details", {}, element("summary", {}, `${number(page.metrics.length)} metrics of the step`),
      element("div", { class: "scroll" }, metrics(page.metrics))));
}

// Fields that leave groups or completions out; what was typed stays from page to page.
function filters(entries, noun) {
  const told = element("span", { class: "soft", role: "status" });
  const apply = () => {
    const word = state.find.toLowerCase(), [least, most] = [state.least, state.most].map((typed) => (typed === "" ? null : Number(typed)));
    const inRange = (reward) => reward !== null && (least === null || reward >= least) && (most === null || reward <= most);
    for (const one of entries) one.node.hidden = !one.text.toLowerCase().includes(word) || !(least === null && most === null || one.rewards.some(inRange));
    const left = entries.filter((one) => !one.node.hidden);
    told.textContent = left.length < entries.length ? `${number(left.length)} of ${number(entries.length)} ${noun}` : "";
    highlight(left.map((one) => one.node), word);
  };
  const field = (key, words, attributes) => {
    const typed = (event) => { state[key] = event.target.value; apply(); };
    return element("label", {}, words, element("input", { ...attributes, id: key, value: state[key], oninput: typed }));
  };
  apply();
  return element("div", { class: "tools" }, field("find", "Find ", { type: "search", placeholder: noun === "groups" ? "in prompts" : "in completions" }),
    entries.some((one) => one.rewards.some((reward) => reward !== null))
      ? [field("least", "Reward from ", { type: "number", step: "any" }), field("most", "to ", { type: "number", step: "any" })] : null, told);
}

// Marks a word wherever it stands in the texts and tokens of some elements, across tokens too.
function highlight(nodes, word) {
  if (CSS.highlights === undefined) return;
  const ranges = [];
  for (const root of word === "" ? [] : nodes.flatMap((node) => [...node.querySelectorAll("pre, .tokens, .prompt")])) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), ends = [];
    let text = "";
    while (walker.nextNode()) { ends.push([text.length, walker.currentNode]); text += walker.currentNode.data; }
    const lower = text.toLowerCase();
    const place = (offset) => { const [start, node] = ends.findLast(([from]) => from <= offset); return [node, offset - start]; };
    for (let at = lower.indexOf(word); lower.length === text.length && at >= 0; at = lower.indexOf(word, at + word.length)) {
      const range = new Range(), [last, offset] = place(at + word.length - 1);
      range.setStart(...place(at));
      range.setEnd(last, offset + 1);
      ranges.push(range);
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

function bar(share) {
  const made = element("span", { class: "bar" });
  made.style.width = `${Math.max(0, 3 * share)}rem`;
  return made;
}

function dots(rewards, [low, high]) {
  const space = "http://www.w3.org/2000/svg", width = 120;
  const svg = document.createElementNS(space, "svg");
  for (const [key, value] of Object.entries({ class: "dots", width, height: 18, role: "img", "aria-label": `rewards ${rewards.map((one) => number(one)).join(", ")}` })) svg.setAttribute(key, value);
  const line = svg.appendChild(document.createElementNS(space, "line"));
  for (const [key, value] of Object.entries({ x1: 5, x2: width - 5, y1: 9, y2: 9 })) line.setAttribute(key, value);
  const counts = new Map();
  for (const value of rewards) if (value !== null) counts.set(value, (counts.get(value) ?? 0) + 1);
  for (const [value, count] of counts) {
    const dot = svg.appendChild(document.createElementNS(space, "circle"));
    const x = high > low ? 8 + (width - 16) * (value - low) / (high - low) : width / 2;
    for (const [key, at] of Object.entries({ cx: x, cy: 9, r: Math.min(8, 2 + 1.6 * Math.sqrt(count)) })) dot.setAttribute(key, at);
  }
  const words = document.createElementNS(space, "title");
  words.textContent = [...counts].sort(([a], [b]) => a - b).map(([value, count]) => `${count} × ${number(value)}`).join(", ");
  svg.prepend(words);
  return svg;
}

function metrics(lines) {
  const rows = lines.map((one) => element("tr", {}, element("td", {}, one.name),
    element("td", { class: "number" }, one.logged === null ? "" : number(one.logged, 6)),
    element("td", { class: "number" }, one.recomputed === null ? "" : number(one.recomputed, 6))));
  return element("table", {}, element("thead", {}, element("tr", {}, element("th", {}, "metric"), element("th", { class: "number" }, "logged"), element("th", { class: "number" }, "recomputed"))), element("tbody", {}, rows));
}

// Group.

const SIGNED = new Set(["change of |gradient|", "gradient", "gradient with the fix", "advantage", "advantage with the fix", "logged advantage", "sampler gap"]);

// With a fix: by how much the size of a token's gradient changes.
function withChange(one) {
  const [before, after] = [one.values[BEFORE], one.values[AFTER]];
  if (!before || !after) return one;
  const change = before.map((value, t) => (value === null || after[t] === null ? null : Math.abs(after[t]) - Math.abs(value)));
  return { ...one, values: { [CHANGE]: change, ...one.values } };
}

// Tools of a group, and the largest value among its completions, which has the full colour.
function groupTools(page, around, completions, words) {
  const names = [...new Set(completions.flatMap((one) => Object.keys(one.values)))];
  if (!names.includes(state.colour)) state.colour = names[0] ?? "mask";
  const choose = (event) => { state.colour = event.target.value; location.hash = address(page.step, page.split, page.group_id); };
  const at = around.indexOf(page.group_id);
  const link = (index, words) => (index >= 0 && index < around.length ? element("a", { href: address(page.step, page.split, around[index]) }, words) : element("span", { class: "soft" }, words));
  const value = (one, t) => scaled(one.values[state.colour]?.[t]);
  let largest = 0;
  for (const one of completions) for (let t = 0; t < one.ids.length || t < (one.values[state.colour]?.length ?? 0); t++) if (one.trained[t] !== false) largest = Math.max(largest, Math.abs(value(one, t) ?? 0));
  state.strongest = completions.flatMap((one) => [one.values[BEFORE], one.values[AFTER]])
    .reduce((most, values) => (values ?? []).reduce((own, size) => Math.max(own, Math.abs(size ?? 0)), most), 0);
  const tools = element("div", { class: "tools" },
      element("label", {}, "Colour tokens by ", element("select", { id: "colour", onchange: choose }, names.map((name) => element("option", { value: name, selected: name === state.colour ? "" : null }, name)))),
    fixChooser(), againstChooser(page), command(words), link(at - 1, "previous group"), link(at + 1, "next group"));
  return [tools, largest];
}

function againstChooser(page) {
  if (state.overview.against === null) return null;
  const choose = (event) => { state.against = event.target.checked; location.hash = address(page.step, page.split, page.group_id); };
  return element("label", {}, element("input", { type: "checkbox", onchange: choose, checked: state.against ? "" : null }), ` Beside ${state.overview.against}`);
}

function groupPage(page, around) {
  const words = `rolloutdoctor export ${runWords()} --what tokens --steps ${page.step}:${page.step + 1}${state.fix === null ? "" : ` --fix ${quoted(state.fix)}`} -o step-${page.step}.parquet`;
  const completions = page.completions.map(withChange);
  const [tools, largest] = groupTools(page, around, completions, words);
  const shown = completions.map((one) => ({ node: completion(one, largest, turnsOf(page, one)), text: one.text ?? one.pieces.join(""), rewards: [one.reward] }));
  return element("div", {},
    tools,
    filters(shown, "completions"),
    page.problem ? element("p", { role: "alert" }, `The loss is not recomputed: ${page.problem}`) : null,
    legend(largest),
    page.prompt === null ? null : [element("h2", {}, "Prompt"), element("pre", {}, page.prompt)],
    trajectories(page),
    element("h2", {}, `${completions.length} completions`),
    shown.map((one) => one.node));
}

// Trajectories: who wrote what, what was trained, and what it weighs. A turn leads to its tokens below.

const AUTHORS = ["model", "tool", "user", "system"];
const turnsOf = (page, one) => (page.trajectories ?? []).flatMap((each) => each.turns).filter((turn) => turn.row === one.sample_id);
const turnKey = (turn) => `turn ${turn.row} ${turn.start}`;

function trajectories(page) {
  const found = page.trajectories ?? [], turns = found.flatMap((one) => one.turns);
  if (!turns.length) return null;
  const derived = turns.some((turn) => turn.derived), largest = Math.max(...turns.map((turn) => turn.gradient ?? 0), 1e-300);
  const swatches = AUTHORS.filter((author) => turns.some((turn) => turn.author === author)).flatMap((author) => [element("i", { class: `span ${author}` }), author]);
  return element("section", { class: "trajectories" },
    element("h2", {}, `${number(found.length)} ${found.length === 1 ? "trajectory" : "trajectories"}, turn by turn`),
    element("p", { class: "legend" }, swatches, turns.some((turn) => turn.trained === 0) ? [element("i", { class: "span untrained" }), "not trained"] : null),
    derived ? element("p", { class: "soft" }, "Derived: the file does not say who wrote what. What is trained is taken to be the model's, and what is masked between two trained runs a tool's.") : null,
    found.map((one) => trajectory(one, page, largest)));
}

function trajectory(one, page, largest) {
  const sum = (name) => one.turns.reduce((total, turn) => total + (name === "tokens" ? turn.stop - turn.start : turn[name] ?? 0), 0);
  const failed = one.turns.filter((turn) => turn.error !== null).length;
  const trained = one.turns.some((turn) => turn.trained !== null) ? `, ${number(sum("trained"))} trained` : "";
  const words = `${number(one.count)} ${one.count === 1 ? "turn" : "turns"} in ${one.rows.length === 1 ? "one row" : `${number(one.rows.length)} rows`}, ${number(sum("tokens"))} tokens${trained}`;
  const fact = (name, value) => (value === null || value === "" ? null : element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  return element("article", { class: "completion trajectory" },
    element("header", {}, element("h3", {}, one.trajectory_id === null ? one.rows[0] : `trajectory ${one.trajectory_id}`),
      element("span", { class: "soft" }, words), one.errors.length ? element("span", { class: "flag error" }, "failed") : null,
      failed ? element("span", { class: "flag error" }, `${number(failed)} ${failed === 1 ? "turn" : "turns"} with an error`) : null),
    element("dl", {}, fact("reward", one.rewards.map((value) => number(value, 4)).join(", ")), fact("ended", one.statuses.join(", ")), fact("error", one.errors.join("; ")),
      fact("|gradient|", one.gradient === null ? null : number(one.gradient)), fact("share of the step's", one.share === null ? null : percent(one.share))),
    element("div", { class: "ribbon", "aria-hidden": "true" }, one.turns.map(ribbonSpan)),
    one.turns.length > 1 || one.turns[0].error !== null ? turnTable(one, page, largest) : null,
    one.count > one.turns.length ? element("p", { class: "soft" }, `The first ${number(one.turns.length)} turns are shown.`) : null);
}

const turnLook = (turn) => `span ${turn.author}${turn.trained === 0 ? " untrained" : ""}${turn.error === null ? "" : " failed"}`;

function ribbonSpan(turn) {
  const made = element("div", { class: turnLook(turn), title: `turn ${turn.turn}: ${turn.author}, ${number(turn.stop - turn.start)} tokens`, onclick: () => toTurn(turn) });
  made.style.flexGrow = Math.max(turn.stop - turn.start, 0.001);
  return made;
}

function toTurn(turn) {
  const mark = [...document.querySelectorAll(".mark")].find((each) => each.dataset.turn === turnKey(turn));
  if (mark !== undefined) mark.scrollIntoView({ block: "center" });
}

function turnTable(one, page, largest) {
  const has = (name) => one.turns.some((turn) => turn[name] !== null);
  const head = (words, kind = "") => element("th", { class: kind }, words);
  const ended = has("status") || has("error"), columns = 4 + ended + has("trained") + has("version") + has("gradient");
  const texts = new Map(page.completions.map((each) => [each.sample_id, each]));
  const lines = one.turns.flatMap((turn, at) => [
    one.rows.length > 1 && turn.row !== one.turns[at - 1]?.row ? element("tr", { class: "row" }, element("td", { colspan: columns }, `row ${turn.row}${texts.has(turn.row) ? "" : ", of another group"}`)) : null,
    element("tr", {},
      element("td", {}, element("button", { onclick: () => toTurn(turn) }, turn.turn)),
      element("td", { class: "author" }, element("span", { class: `author ${turn.author}` }, turn.author), turn.derived ? element("span", { class: "soft" }, " derived") : null),
      ended ? element("td", {}, turn.status === null ? null : `${turn.status} `, turn.error === null ? null : element("span", { class: "odd" }, turn.error)) : null,
      has("version") ? element("td", { class: "number wide" }, turn.version) : null,
      element("td", { class: "number" }, number(turn.stop - turn.start)),
      has("trained") ? element("td", { class: "number" }, turn.trained === 0 ? "masked" : number(turn.trained)) : null,
      has("gradient") ? element("td", { class: "number" }, number(turn.gradient), element("span", { class: "wide soft" }, turn.share ? ` ${percent(turn.share)}` : ""), bar((turn.gradient ?? 0) / largest)) : null,
      element("td", { class: "wide" }, element("div", { class: "prompt" }, wording(texts.get(turn.row), turn))))]);
  return element("div", { class: "scroll" }, element("table", { class: "turns" }, element("thead", {}, element("tr", {}, head("turn"), head("author"),
    ended ? head("ended, error") : null, has("version") ? head("version", "number wide") : null, head("tokens", "number"), has("trained") ? head("trained", "number") : null,
    has("gradient") ? element("th", { class: "number" }, "|gradient|", element("span", { class: "wide" }, ", share of the step's")) : null, head("", "wide"))), element("tbody", {}, lines)));
}

// The beginning of what stands in a turn.
function wording(one, turn) {
  if (one === undefined) return "";
  const part = one.pieces.length ? one.pieces.slice(turn.start, Math.min(turn.stop, turn.start + 60)).join("") : one.ids.slice(turn.start, Math.min(turn.stop, turn.start + 20)).join(" ");
  return part.replace(/\s+/g, " ").trim();
}

function againstPage(page, around) {
  // compare takes each run as one argument.
  const words = state.overview.paths.length > 1 ? null : `rolloutdoctor compare ${runWords()} ${quoted(state.overview.against)} --steps ${page.step}:${page.step + 1}`;
  const pairs = page.pairs.map((pair) => ({ a: pair.a && withChange(pair.a), b: pair.b && withChange(pair.b) }));
  const [tools, largest] = groupTools(page, around, pairs.flatMap((pair) => [pair.a, pair.b]).filter((one) => one !== null), words);
  const names = [`A: ${state.overview.name}`, `B: ${state.overview.against}`];
  const sides = (...two) => element("div", { class: "sides" }, two);
  const side = (one) => (one === null ? element("p", { class: "completion soft" }, "No row with this step and sample_id.") : completion(one, largest));
  const prompt = (text) => (text === null ? element("p", { class: "soft" }, "No text.") : element("pre", {}, text));
  const equal = page.prompts[0] === page.prompts[1];
  return element("div", {},
    tools,
    page.problems.map((problem, at) => (problem ? element("p", { role: "alert" }, `${names[at]}: the loss is not recomputed: ${problem}`) : null)),
    legend(largest),
    equal && page.prompts[0] === null ? null : [element("h2", {}, equal ? "Prompt of both" : "The prompts differ"), equal ? prompt(page.prompts[0]) : sides(...page.prompts.map(prompt))],
    element("h2", {}, `${number(page.pairs.length)} completions, ${number(page.pairs.filter((pair) => pair.same).length)} the same in both`),
    sides(...names.map((name) => element("h3", {}, name))),
    pairs.map((pair) => sides(side(pair.a), side(pair.b))));
}

// Ratios are shown by their distance from 1, on a log scale.
function scaled(value) {
  if (value === null || value === undefined) return null;
  return state.colour === "ratio" ? (value > 0 ? Math.log(value) : null) : value;
}

function shade(made, value, largest) {
  if (value === null || !largest || !value) return;
  // The derivative is of the loss: where it is below 0, the update makes the token more likely.
  const raises = state.colour.startsWith("gradient") ? value < 0 : value > 0;
  made.style.backgroundColor = rgb(raises || !(SIGNED.has(state.colour) || state.colour === "ratio") ? "--up" : "--down", (0.75 * Math.sqrt(Math.abs(value) / largest)).toFixed(3));
}

function legend(largest) {
  const box = element("p", { class: "legend" });
  if (state.colour === "mask") return box;
  const signed = SIGNED.has(state.colour) || state.colour === "ratio";
  const words = state.colour === CHANGE ? ["smaller with the fix", "larger with the fix"] : state.colour.startsWith("gradient") ? ["made less likely", "made more likely"]
    : state.colour === "ratio" ? ["ratio below 1", "ratio above 1"] : ["below 0", signed ? "above 0" : "larger"];
  const swatch = (name) => { const made = element("i"); made.style.backgroundColor = rgb(name, 0.75); return made; };
  const pair = (...parts) => element("span", {}, parts);
  if (signed) box.append(pair(swatch("--down"), words[0]));
  box.append(pair(swatch("--up"), words[1]));
  if (state.colour === CHANGE) box.append(element("span", {}, element("i", { class: "before" }), "|gradient| before, ", element("i", { class: "after" }), "after: bars below the tokens"));
  box.append(element("span", { class: "soft" }, `full colour: ${number(state.colour === "ratio" ? Math.exp(largest) : largest)}; struck through: not trained`));
  return box;
}

function completion(one, largest, turns = []) {
  const advantage = (words, value, odd = false) => (value === null ? null : element("div", {}, element("dt", {}, words), element("dd", { class: odd ? "odd" : null }, number(value, 4))));
  const masked = one.trained.length > 0 && !one.trained.includes(true);
  return element("article", { class: "completion" },
    element("header", {}, element("h3", {}, one.sample_id),
      element("span", { class: "soft" }, `${number(one.length)} tokens${one.length > one.ids.length && one.ids.length ? `, the first ${number(one.ids.length)} shown` : ""}${one.status === null ? "" : `, ${one.status}`}`),
      masked ? element("span", { class: "flag warning" }, "fully masked") : null),
    element("dl", {}, advantage("reward", one.reward),
      Object.entries(one.rewards).map(([name, value]) => advantage(name, value)),
      advantage("advantage logged", one.logged, one.differs), advantage("recomputed", one.recomputed), advantage("with the fix", one.fixed),
      one.values[CHANGE] && one.length === one.values[CHANGE].length
        ? element("div", {}, element("dt", {}, "sum of |gradient|"), element("dd", {}, [BEFORE, AFTER].map((name) => number(size(one.values[name]))).join(" → "))) : null),
    one.text !== null && !one.pieces.length ? element("pre", {}, one.text) : null,
    tokens(one, largest, turns));
}

const size = (values) => values.reduce((sum, value) => sum + Math.abs(value ?? 0), 0);

// Two bars below a token: the size of its gradient before and after the fix.
function sized(made, one, t) {
  if (!state.strongest || !one.values[AFTER]) return;
  made.classList.add("sized");
  for (const [name, values] of [["--before", one.values[BEFORE]], ["--after", one.values[AFTER]]]) {
    made.style.setProperty(name, `${(100 * Math.abs(values[t] ?? 0) / state.strongest).toFixed(1)}%`);
  }
}

function tokens(one, largest, turns) {
  const count = Math.max(one.ids.length, ...Object.values(one.values).map((each) => each.length), 0);
  const line = element("div", { class: one.pieces.length ? "tokens" : "tokens ids" });
  const starts = new Map(turns.length > 1 ? turns.map((turn) => [turn.start, turn]) : []);
  for (let t = 0; t < count; t++) {
    const turn = starts.get(t);
    if (turn !== undefined) line.append(element("b", { class: `mark author ${turn.author}`, "data-turn": turnKey(turn) }, `${turn.turn} ${turn.author}`));
    const made = element("span", { "data-t": t }, one.pieces[t] ?? one.ids[t] ?? "·");
    if (one.trained[t] === false) made.className = "masked";
    else shade(made, scaled(one.values[state.colour]?.[t]), largest);
    if (state.colour === CHANGE && one.trained[t] !== false) sized(made, one, t);
    line.append(made);
  }
  line.addEventListener("mousemove", (event) => {
    const t = event.target.dataset?.t;
    if (t === undefined) { tip.textContent = ""; return; }
    const values = Object.entries(one.values).map(([name, each]) => `${name} ${number(each[t], 4)}`);
    tip.textContent = [`token ${t}${one.ids[t] === undefined ? "" : `, id ${one.ids[t]}`}${one.trained[t] === false ? ", not trained" : ""}`, ...values].join("\n");
    tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 280)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  });
  line.addEventListener("mouseleave", () => { tip.textContent = ""; });
  return line;
}

// Keys.

addEventListener("keydown", async (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const { step, split, group } = parsed();
  if (event.key === "u" && step !== undefined) location.hash = group === undefined ? address() : address(step, split);
  if ((event.key === "n" || event.key === "p") && state.overview?.steps.length) {
    const own = state.overview.steps.filter((one) => one[1] === (split ?? "train"));
    const at = own.findIndex((one) => one[0] === step), next = own[step === undefined ? 0 : at + (event.key === "n" ? 1 : -1)];
    if (next !== undefined) location.hash = address(next[0], next[1]);
  }
  if ((event.key === "j" || event.key === "k") && step !== undefined) {
    const around = await neighbours(step, split);
    const next = around[group === undefined ? 0 : around.indexOf(group) + (event.key === "j" ? 1 : -1)];
    if (next !== undefined) location.hash = address(step, split, next);
  }
  if (event.key === "c" && group !== undefined) {
    const options = [...document.querySelectorAll("#colour option")].map((one) => one.value);
    state.colour = options[(options.indexOf(state.colour) + 1) % options.length];
    location.hash = address(step, split, group);
  }
});

// In a shared page, links would lead to the page around this one.
addEventListener("click", (event) => {
  const link = event.target.closest?.('a[href^="#"]');
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  location.hash = link.getAttribute("href");
});

addEventListener("hashchange", show);
show().then(judge);
