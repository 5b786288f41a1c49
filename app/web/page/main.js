// Draws strokes, sends each new drawing to the server, shows the answer.

const SIDE = 140; // pixels of the drawing that the server gets
const PEN = 0.075; // width of a stroke, as a share of the side
const NO_ANSWER = "The server does not answer. Is it still running?";

const part = (id) => document.getElementById(id);
const canvas = part("drawing");
const small = new OffscreenCanvas(SIDE, SIDE).getContext("2d", { willReadFrequently: true });
let strokes = []; // of points [x, y], in units of the side
let current = null; // the stroke of the pointer that is down
let isBusy = false;

function paint(context, ground, ink) {
  const side = context.canvas.width;
  context.fillStyle = ground;
  context.fillRect(0, 0, side, side);
  context.lineCap = context.lineJoin = "round";
  context.lineWidth = PEN * side;
  context.strokeStyle = ink;
  for (const stroke of strokes) {
    const points = stroke.map(([x, y]) => [x * side, y * side]);
    let last = points[0];
    context.beginPath();
    context.moveTo(...last);
    for (const point of points) {
      context.quadraticCurveTo(...last, (last[0] + point[0]) / 2, (last[1] + point[1]) / 2);
      last = point;
    }
    context.lineTo(...last); // a single point becomes a dot
    context.stroke();
  }
}

// Return the drawing as bytes of gray, bright on black.
function toGray() {
  paint(small, "black", "white");
  const { data } = small.getImageData(0, 0, SIDE, SIDE);
  return new Uint8Array(new Uint32Array(data.buffer)); // of each pixel the first byte
}

function pointOf(event) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
}

function changed() {
  document.body.dataset.version = Number(document.body.dataset.version) + 1;
  part("undo").disabled = part("clear").disabled = strokes.length === 0;
  answer();
  paint(canvas.getContext("2d"), "white", "black");
}

async function request(path, body) {
  const response = await fetch(`api/${path}`, { method: body ? "POST" : "GET", body }).catch(() => {
    throw new Error(NO_ANSWER);
  });
  const value = await response.json();
  if (!response.ok) throw new Error(value.error);
  return value;
}

// Only the newest drawing is sent while an answer is on its way.
async function answer() {
  if (isBusy) return;
  isBusy = true;
  const output = part("digit");
  while (output.dataset.version !== document.body.dataset.version) {
    const { version } = document.body.dataset;
    const path = `predict?${new URLSearchParams({ network: part("network").value })}`;
    try {
      const found = strokes.length ? await request(path, toGray()) : { probabilities: [], pictures: [] };
      show(found);
      const isBlank = strokes.length && !found.probabilities.length && !current; // a dot begins a stroke
      part("message").textContent = isBlank ? "No digit found" : "";
    } catch (error) {
      part("message").textContent = error.message;
    }
    output.dataset.version = version;
  }
  isBusy = false;
}

function show({ probabilities, pictures }) {
  const [best, share] = probabilities.toSorted((one, other) => other[1] - one[1])[0] ?? [""];
  if (part("digit").textContent !== best) part("digit").textContent = best; // read aloud
  part("digit").className = best.length > 1 ? "word" : "";
  update(part("bars"), "li", probabilities, (bar, [name, value]) => {
    const text = `${(100 * value).toFixed(1)}%`;
    bar.replaceChildren(name, Object.assign(document.createElement("span"), { textContent: text }));
    bar.classList.toggle("best", value === share);
    bar.style.setProperty("--share", text);
  });
  update(part("pictures"), "figure", pictures, (figure, [title, source]) => {
    if (!figure.firstChild) figure.append(...["img", "figcaption"].map((it) => document.createElement(it)));
    Object.assign(figure.firstChild, { src: source, alt: title }); // a new element would flicker
    figure.lastChild.textContent = title;
  });
}

// Fill one child of `parent` for each value.
function update(parent, tag, values, fill) {
  while (parent.children.length > values.length) parent.lastChild.remove();
  while (parent.children.length < values.length) parent.append(document.createElement(tag));
  values.forEach((value, index) => fill(parent.children[index], value));
}

canvas.addEventListener("pointerdown", (event) => {
  if (!event.isPrimary || event.button !== 0) return;
  if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
  current = [pointOf(event)];
  strokes.push(current);
  changed();
});
canvas.addEventListener("pointermove", (event) => {
  if (!strokes.includes(current) || !event.isPrimary) return; // it may have been removed meanwhile
  const events = event.getCoalescedEvents?.() ?? [];
  current.push(...(events.length ? events : [event]).map(pointOf));
  changed();
});
for (const name of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(name, () => {
    current = null;
    if (!part("bars").firstChild) changed();
  });
}
part("undo").addEventListener("click", () => {
  strokes.pop();
  changed();
});
part("clear").addEventListener("click", () => {
  strokes = [];
  changed();
});
part("network").addEventListener("change", changed);

try {
  const networks = await request("networks");
  part("network").append(...networks.map(({ id, title }) => new Option(title, id)));
  changed();
  document.body.dataset.ready = "true";
} catch (error) {
  part("message").textContent = error.message;
}
