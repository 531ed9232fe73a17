// Reads the metrics that are served beside this page once a second, and plots what devices do.
//
// The server puts MEASURES (what a family adds to), DEVICES (labels that name a device) and ASIDE
// (histograms of what is no request) before this. Rates and times are those of `farlane top`.
// Whatever is read may be anybody's: it becomes text and numbers, never markup.

/** Milliseconds from one question to the next, and that an answer may take. */
const INTERVAL = 1000;
const PATIENCE = 5000;
/** Seconds that are plotted. */
const WINDOW = 120;
/** Seconds that two clocks are apart by where the machine has slept. */
const SLEPT = 2;
/** Most devices that are shown, characters of a name, and buckets of a device. */
const MOST_DEVICES = 64;
const MOST_CHARACTERS = 256;
const MOST_BUCKETS = 4096;
const OPEN_METRICS = 'application/openmetrics-text; version=1.0.0';

// Reading (OpenMetrics 1.0.0)

const SAMPLE = /^([a-zA-Z0-9_:]+)(\{(?:[a-zA-Z0-9_:]+="(?:[^"\\]|\\[^])*",?)*\})? (\S+)/;
const LABEL = /([a-zA-Z0-9_:]+)="((?:[^"\\]|\\[^])*)"/g;

/** A line as a sample, or null. */
function sample(line) {
  const found = SAMPLE.exec(line);
  if (!found) {
    return null;
  }
  const labels = new Map();
  for (const [, name, value] of (found[2] || '').matchAll(LABEL)) {
    labels.set(name, value.replace(/\\([^])/g, (_, c) => (c === 'n' ? '\n' : c)));
  }
  return { name: found[1], labels, value: found[3] };
}

/** A count, or null: whole numbers of 64 bits are more than a Number holds. */
function integer(text) {
  return /^\d{1,20}$/.test(text) ? BigInt(text) : null;
}

function bound(text) {
  if (text === '+Inf') {
    return Infinity;
  }
  const value = /^[0-9.]+([eE][+-]?\d+)?$/.test(text) ? Number(text) : NaN;
  return value >= 0 ? value : null;
}

function cut(name) {
  return Array.from(name).slice(0, MOST_CHARACTERS).join('');
}

/** A name as it is shown: what is no character of a line, or turns its direction, by its number. */
function printable(name) {
  return name.replace(/[\p{Cc}\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/gu, (it) => {
    return `\\u{${it.codePointAt(0).toString(16)}}`;
  });
}

/** What a document says of a backend, or null where it is none of one. */
function parse(text) {
  if (!text.endsWith('# EOF\n')) {
    return null;
  }
  const backend = { program: null, version: '', started: null, devices: new Map(), more: 0 };
  const others = new Set();
  for (const line of text.split('\n')) {
    const found = sample(line);
    if (!found) {
      continue;
    }
    const { name, labels, value } = found;
    if (name === 'farlane_build_info') {
      backend.program = printable(cut(labels.get('program') || ''));
      backend.version = printable(cut(labels.get('version') || ''));
    } else if (name === 'farlane_daemon_start_time_seconds') {
      backend.started = integer(value);
    } else {
      take(backend, others, found);
    }
  }
  backend.more = others.size;
  return backend.program === null ? null : backend;
}

/** Adds a sample to its device. */
function take(backend, others, { name, labels, value }) {
  const label = Array.from(labels.keys()).find((label) => DEVICES.includes(label));
  if (label === undefined) {
    return;
  }
  const called = cut(labels.get(label));
  const key = JSON.stringify([label, called]);
  let device = backend.devices.get(key);
  if (!device) {
    if (backend.devices.size >= MOST_DEVICES) {
      others.add(key);
      return;
    }
    device = { label, name: printable(called), totals: new Map(), times: new Map(), buckets: 0 };
    backend.devices.set(key, device);
  }
  const count = integer(value);
  if (count === null) {
    return;
  }
  const family = name.replace(/_total$/, '');
  if (Object.hasOwn(MEASURES, family)) {
    const measure = MEASURES[family];
    device.totals.set(measure, (device.totals.get(measure) || 0n) + count);
  }
  const upper = labels.has('le') ? bound(labels.get('le')) : null;
  const isTime = name.endsWith('_seconds_bucket') && !ASIDE.includes(name.replace(/_bucket$/, ''));
  if (isTime && upper !== null && device.buckets < MOST_BUCKETS) {
    const rest = Array.from(labels).filter(([label]) => label !== 'le');
    const series = JSON.stringify([name, rest]);
    const counts = device.times.get(series) || new Map();
    device.times.set(series, counts.set(upper, count));
    device.buckets += 1;
  }
}

// Rates

/** What a counter has grown by; one that has fallen began anew. */
function grown(old, now) {
  return now >= old ? now - old : now;
}

/** How many took how long since `before`: pairs of an upper bound and a count, in order. */
function distribution(before, now) {
  const counts = new Map();
  for (const [series, buckets] of now) {
    const old = before.get(series) || new Map();
    let below = 0n;
    for (const [upper, count] of Array.from(buckets).sort(([a], [b]) => a - b)) {
      const of = grown(old.get(upper) || 0n, count);
      const own = of > below ? of - below : 0n;
      counts.set(upper, (counts.get(upper) || 0) + Number(own));
      below = of;
    }
  }
  return Array.from(counts).sort(([a], [b]) => a - b);
}

/** The least bound that holds for this part of all; null of nothing. */
function quantile(counts, part) {
  const wanted = counts.reduce((sum, [, count]) => sum + count, 0) * part;
  let sum = 0;
  for (const [upper, count] of counts) {
    sum += count;
    if (count > 0 && sum >= wanted) {
      return upper;
    }
  }
  return null;
}

/** What a device has done from one look to the next, `seconds` apart. */
function step(old, now, seconds, isNew) {
  const since = (measure) => {
    const value = now.totals.get(measure);
    if (value === undefined) {
      return null;
    }
    return Number(isNew ? value : grown(old.totals.get(measure) || 0n, value));
  };
  const rate = (measure) => {
    const value = since(measure);
    return value === null ? null : seconds > 0 ? value / seconds : 0;
  };
  const counts = distribution(isNew ? new Map() : old.times, now.times);
  const all = since('all-bytes');
  return {
    bytes: rate('bytes'),
    requests: rate('requests'),
    p50: quantile(counts, 0.5),
    p99: quantile(counts, 0.99),
    local: all ? (100 * Math.min(since('local-bytes') || 0, all)) / all : null,
  };
}

/** Whether a counter of a device is less than it was. */
function hasFallen(old, now) {
  return ['bytes', 'requests', 'failovers'].some(
    (measure) => (old.totals.get(measure) || 0n) > (now.totals.get(measure) || 0n),
  );
}

// Numbers as text

const PREFIXES = ['', 'k', 'M', 'G', 'T', 'P', 'E'];

function scaled(value, unit) {
  let at = 0;
  while (value >= 999.5 && at < PREFIXES.length - 1) {
    value /= 1000;
    at += 1;
  }
  const digits = value >= 99.5 || Number.isInteger(value) ? 0 : value >= 9.95 ? 1 : 2;
  return `${value.toFixed(digits)} ${PREFIXES[at]}${unit}`.trim();
}

function seconds(value) {
  if (value === Infinity) {
    return 'longer';
  }
  const [factor, unit] = value < 0.9995e-3 ? [1e6, 'µs'] : value < 0.9995 ? [1e3, 'ms'] : [1, 's'];
  return `${Number((value * factor).toPrecision(3))} ${unit}`;
}

const bytes = (value) => scaled(value, 'B/s');
const requests = (value) => scaled(value, '/s');
const plain = (value) => String(value);

function clock(date) {
  return date.toLocaleTimeString(undefined, { hourCycle: 'h23' });
}

/** Columns of tables: title, what is shown, how, and whether only where something is told. */
const COLUMNS = [
  { title: 'Bytes/s', of: 'bytes', text: bytes },
  { title: 'Requests/s', of: 'requests', text: requests },
  { title: 'p50', of: 'p50', text: seconds, isTimes: true },
  { title: 'p99', of: 'p99', text: seconds, isTimes: true },
  { title: 'Connected', of: 'connected', text: plain, isTotal: true },
  { title: 'Leases', of: 'leases', text: plain, isTotal: true },
  { title: 'Failovers', of: 'failovers', text: plain, isTotal: true },
  { title: 'Local', of: 'local', text: (value) => `${value.toFixed(0)} %` },
];

// Drawing

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, text = '') {
  const made = document.createElementNS('http://www.w3.org/2000/svg', name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.textContent = text;
  return made;
}

/** A cell with a number: whole in `value`, as people read it in its text. */
function cell(value, text) {
  if (value === null || value === undefined) {
    return element('td', {}, '–');
  }
  return element('td', {}, element('data', { value: String(value) }, text(value)));
}

/** The plot: its size, and the edges of what is drawn. */
const [WIDTH, HEIGHT] = [360, 132];
const [LEFT, RIGHT, TOP, BOTTOM] = [64, 352, 10, 112];

/** The least of 1, 2, 4, 6, 8, 10, … that is no less: its half is short, too. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((n) => n * power).find((n) => n >= value) || 10 * power;
}

/** From zero to the greatest. */
function linear(values) {
  const most = roundUp(Math.max(10, ...values));
  return { ticks: [0, most / 2, most], at: (value) => value / most };
}

/** By powers of ten, for times. What is longer than all buckets is at the upper edge. */
function logarithmic(values) {
  const finite = values.filter((value) => value > 0 && value < Infinity).map(Math.log10);
  const low = Math.floor(Math.min(-5, ...finite));
  const high = Math.ceil(Math.max(-3, ...finite));
  const count = high - low;
  const ticks = Array.from({ length: count + 1 }, (_, n) => 10 ** (low + n));
  const at = (value) => (value > 0 ? (Math.log10(value) - low) / count : 0);
  return {
    ticks: count > 4 ? ticks.filter((_, n) => n % 2 === 0) : ticks,
    at: (value) => Math.min(1, Math.max(0, at(value))),
  };
}

const PLOTS = [
  { title: 'Bytes a second', lines: ['bytes'], text: bytes, scale: linear },
  { title: 'Requests a second', lines: ['requests'], text: requests, scale: linear },
  { title: 'Request time', lines: ['p50', 'p99'], text: seconds, scale: logarithmic },
];

/** One plot of a device: made once, drawn anew at each look. */
class Plot {
  constructor(device, { title, lines, text, scale }) {
    Object.assign(this, { lines, text, scale });
    const name = `${title} of ${device.label} ${device.name}, last two minutes`;
    this.svg = drawn('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img', 'aria-label': name });
    this.keys = lines.map((line, n) => {
      const kind = n === 0 ? 'key' : 'key second';
      return element('span', lines.length > 1 ? { class: kind } : {}, '–');
    });
    const caption = element('figcaption', {}, `${title}: `, ...this.keys);
    this.figure = element('figure', {}, caption, this.svg);
  }

  draw(points, now, anew) {
    const values = points.flatMap((point) => this.lines.map((line) => point[line]));
    const { ticks, at } = this.scale(values.filter((value) => value !== null));
    const x = (time) => RIGHT - ((now - time) / WINDOW) * (RIGHT - LEFT);
    const y = (value) => BOTTOM - at(value) * (BOTTOM - TOP);
    const parts = [];
    for (const tick of ticks) {
      const [from, to] = [LEFT, RIGHT];
      parts.push(drawn('line', { class: 'grid', x1: from, x2: to, y1: y(tick), y2: y(tick) }));
      const place = { x: LEFT - 6, y: y(tick) + 4, 'text-anchor': 'end' };
      parts.push(drawn('text', place, this.text(tick)));
    }
    for (const [ago, text, anchor] of [
      [WINDOW, '−2 min', 'start'],
      [WINDOW / 2, '−1 min', 'middle'],
      [0, 'now', 'end'],
    ]) {
      parts.push(drawn('text', { x: x(now - ago), y: HEIGHT - 4, 'text-anchor': anchor }, text));
    }
    for (const time of anew) {
      parts.push(drawn('line', { class: 'anew', x1: x(time), x2: x(time), y1: TOP, y2: BOTTOM }));
    }
    this.lines.forEach((line, n) => {
      for (const run of runs(points, line)) {
        // A point alone is a dot: a line of no length has round ends.
        const ends = run.length === 1 ? [run[0], run[0]] : run;
        const place = ends.map((p) => `${x(p.time).toFixed(2)},${y(p[line]).toFixed(2)}`);
        const kind = n === 0 ? line : `${line} second`;
        parts.push(drawn('polyline', { class: kind, points: place.join(' ') }));
      }
      const last = points.length > 0 ? points[points.length - 1][line] : null;
      const told = last === null ? '–' : this.text(last);
      this.keys[n].textContent = this.lines.length > 1 ? `${line} ${told}` : told;
    });
    this.svg.replaceChildren(...parts);
  }
}

/** What a device has done of which nothing is known. */
const NOTHING = { bytes: null, requests: null, p50: null, p99: null, local: null };

/** Points with a value, in unbroken runs. */
function runs(points, line) {
  const found = [[]];
  for (const point of points) {
    if (point[line] === null) {
      found.push([]);
    } else {
      found[found.length - 1].push(point);
    }
  }
  return found.filter((run) => run.length > 0);
}

/** A device on the page, and what it has done. */
class Card {
  constructor(device) {
    this.points = [];
    /** When it began anew. */
    this.begins = [];
    this.plots = new Map();
    this.device = device;
    const kind = element('span', {}, device.label);
    const title = element('h2', {}, kind, ' ', device.name);
    this.figures = element('div', { class: 'plots' });
    this.rows = element('tbody');
    const heads = ['Seconds ago', ...COLUMNS.slice(0, 4).map((column) => column.title)];
    const head = element('tr', {}, ...heads.map((text) => element('th', { scope: 'col' }, text)));
    const table = element('table', {}, element('thead', {}, head), this.rows);
    this.details = element(
      'details',
      {},
      element('summary', {}, 'Numbers of these plots'),
      element('div', { class: 'wide', tabindex: '0' }, table),
    );
    this.details.addEventListener('toggle', () => this.list());
    const name = `${device.label} ${device.name}`;
    this.section = element('section', { 'aria-label': name }, title, this.figures, this.details);
  }

  /** Adds what it has done up to a time. */
  add(time, done) {
    this.points.push({ time, ...done });
    this.points = this.points.filter((point) => point.time >= time - WINDOW);
    this.begins = this.begins.filter((begin) => begin >= time - WINDOW);
  }

  draw(now) {
    for (const plot of PLOTS) {
      const isTold = this.points.some((point) => plot.lines.some((line) => point[line] !== null));
      if (isTold && !this.plots.has(plot)) {
        this.plots.set(plot, new Plot(this.device, plot));
        const known = PLOTS.filter((plot) => this.plots.has(plot));
        this.figures.replaceChildren(...known.map((plot) => this.plots.get(plot).figure));
      }
    }
    this.plots.forEach((plot) => plot.draw(this.points, now, this.begins));
    this.list(now);
  }

  /** The points as a table, the last one first, where that is open. */
  list(now = performance.now() / 1000) {
    if (!this.details.open) {
      return;
    }
    const row = (point) => {
      const ago = element('data', { value: String(point.time) }, (now - point.time).toFixed(0));
      const cells = COLUMNS.slice(0, 4).map((column) => cell(point[column.of], column.text));
      return element('tr', {}, element('th', { scope: 'row' }, ago), ...cells);
    };
    this.rows.replaceChildren(...this.points.map(row).reverse());
  }
}

// The page

const page = {
  state: document.getElementById('state'),
  anew: document.getElementById('anew'),
  table: document.getElementById('now'),
  more: document.getElementById('more'),
  devices: document.getElementById('devices'),
  cards: new Map(),
  last: null,
  /** When something began anew, and since when it does not answer. */
  anewAt: -Infinity,
  silentSince: null,
};

function say(kind, text) {
  page.state.className = kind;
  // Said once, and not each second.
  if (page.state.textContent !== text) {
    page.state.textContent = text;
  }
}

/** Says that something began anew, for as long as that is plotted. */
function announce(who, time) {
  page.anewAt = time;
  page.anew.textContent = `${who} began anew at ${clock(new Date())}: rates are since then.`;
}

function show({ backend, time, date }) {
  const { last } = page;
  // The page's clock stands still while its machine sleeps.
  const hasSlept = last !== null && date - last.date - (time - last.time) > SLEPT;
  const isAnew = last !== null && last.backend.started !== backend.started;
  if (isAnew) {
    announce('The backend', time);
  }
  document.title = `${backend.program} – Farlane`;
  document.getElementById('program').textContent = backend.program;
  const since = backend.started === null ? null : new Date(Number(backend.started) * 1000);
  const started = since && !Number.isNaN(since.getTime()) ? `, since ${since.toLocaleString()}` : '';
  document.getElementById('about').textContent = `version ${backend.version}${started}`;
  for (const [key, card] of page.cards) {
    if (!backend.devices.has(key)) {
      card.section.remove();
      page.cards.delete(key);
    }
  }
  for (const [key, device] of backend.devices) {
    let card = page.cards.get(key);
    if (!card) {
      card = new Card(device);
      page.cards.set(key, card);
      page.devices.append(card.section);
    }
    const old = last && last.backend.devices.get(key);
    const isNew = Boolean(old) && (isAnew || hasFallen(old, device));
    // At its first look there is nothing to compare it with.
    card.add(time, old && !hasSlept ? step(old, device, time - last.time, isNew) : NOTHING);
    if (isNew) {
      card.begins.push(time);
    }
    if (isNew && !isAnew) {
      announce(`${device.label} ${device.name}`, time);
    }
  }
  page.more.hidden = backend.more === 0;
  page.more.textContent = `${backend.more} more devices are not shown.`;
  page.last = { backend, time, date };
  table(backend, true);
}

/** The table of what all devices do now. */
function table(backend, answers) {
  const rows = Array.from(backend.devices).map(([key, device]) => {
    const { points } = page.cards.get(key);
    return { device, point: points[points.length - 1] };
  });
  const value = ({ device, point }, { of, isTotal }) => {
    return isTotal ? (answers ? device.totals.get(of) : null) : point[of];
  };
  const hasTimes = Array.from(backend.devices.values()).some((device) => device.times.size > 0);
  const shown = COLUMNS.filter((column) => {
    const isTold = rows.some((row) => (value(row, column) ?? null) !== null);
    return column.isTimes ? hasTimes : isTold || ['bytes', 'requests'].includes(column.of);
  });
  const heads = ['Device', ...shown.map((column) => column.title)];
  const head = heads.map((text) => element('th', { scope: 'col' }, text));
  page.table.tHead.rows[0].replaceChildren(...head);
  const body = rows.map((row) => {
    const name = element('th', { scope: 'row' }, `${row.device.label} ${row.device.name}`);
    const cells = shown.map((column) => cell(value(row, column), column.text));
    return element('tr', {}, name, ...cells);
  });
  page.table.tBodies[0].replaceChildren(...body);
  page.table.hidden = rows.length === 0;
}

/** Asks once. Throws where there is no answer, or another. */
async function ask() {
  const response = await fetch('metrics', {
    cache: 'no-store',
    credentials: 'omit',
    redirect: 'error',
    headers: { Accept: OPEN_METRICS },
    signal: AbortSignal.timeout(PATIENCE),
  });
  const time = performance.now() / 1000;
  const date = Date.now() / 1000;
  if (!response.ok) {
    throw new Error(`status ${response.status}`);
  }
  const backend = parse(await response.text());
  if (backend === null) {
    throw new Error('no metrics of a backend');
  }
  return { backend, time, date };
}

async function look() {
  const begin = performance.now();
  try {
    const answer = await ask().catch((error) => ({ error }));
    if (answer.error) {
      silence(answer.error);
    } else {
      page.silentSince = null;
      show(answer);
      say('answers', 'The backend answers.');
    }
    const now = performance.now() / 1000;
    page.anew.hidden = page.anewAt < now - WINDOW;
    page.cards.forEach((card) => card.draw(now));
  } catch (error) {
    // What fails in the page is not said to be the backend's.
    say('silent', 'The page has failed: load it again.');
    throw error;
  } finally {
    // One question at a time.
    setTimeout(look, Math.max(0, INTERVAL - (performance.now() - begin)));
  }
}

/** Says that there was no answer, and why. */
function silence(error) {
  page.silentSince ??= new Date();
  const why = error instanceof TypeError ? 'no connection' : error.message;
  say('silent', `The backend has not answered since ${clock(page.silentSince)}: ${why}.`);
  page.cards.forEach((card) => card.add(performance.now() / 1000, NOTHING));
  if (page.last) {
    table(page.last.backend, false);
  }
}

look();
