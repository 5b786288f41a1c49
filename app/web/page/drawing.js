// The drawing area: strokes by mouse, pen, touch and keyboard; pictures; undo.
//
// A state is {strokes} or {picture, png}: what was drawn, or a picture file. States are never changed
// but replaced, so that undo is a stack of them.

const SIDE = 140; // pixels of the drawing that the server gets
const PEN = 0.075; // width of a stroke; lengths are shares of the drawing's side
const STEP = 0.04; // of the keyboard's pen
const EMPTY = { strokes: [] };
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export function isEmpty(state) {
  return state.strokes?.length === 0;
}

export function drawStrokes(context, strokes, side, colour) {
  context.lineCap = context.lineJoin = "round";
  context.lineWidth = PEN * side;
  context.strokeStyle = colour;
  for (const points of strokes) {
    const [first, ...rest] = points.map(([x, y]) => [x * side, y * side]);
    context.beginPath();
    context.moveTo(...first);
    context.lineTo(...first); // a single point becomes a dot
    let last = first;
    for (const point of rest) {
      context.quadraticCurveTo(...last, (last[0] + point[0]) / 2, (last[1] + point[1]) / 2);
      last = point;
    }
    context.lineTo(...last);
    context.stroke();
  }
}

export class Drawing extends EventTarget {
  #canvas;
  #context;
  #history = [];
  #state = EMPTY;
  #small = new OffscreenCanvas(SIDE, SIDE).getContext("2d", { willReadFrequently: true });
  #isDrawing = false;
  #pen = { x: 0.5, y: 0.3, down: false, visible: false };
  #held = new Set();

  constructor(canvas) {
    super();
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d");
    canvas.addEventListener("pointerdown", (event) => this.#press(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    canvas.addEventListener("pointerup", () => this.#lift());
    canvas.addEventListener("pointercancel", () => this.#lift());
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("keyup", (event) => this.#held.delete(event.key));
    canvas.addEventListener("focus", () => this.#showPen(canvas.matches(":focus-visible")));
    canvas.addEventListener("blur", () => this.#leave());
    new ResizeObserver(() => this.#resize()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  get state() {
    return this.#state;
  }

  get canUndo() {
    return this.#history.length > 0;
  }

  show(state) {
    this.#lift();
    this.#history.push(this.#state);
    this.#state = state;
    this.#changed();
  }

  clear() {
    if (!isEmpty(this.#state)) this.show(EMPTY);
  }

  undo() {
    this.#lift();
    if (!this.canUndo) return;
    this.#state = this.#history.pop();
    this.#changed();
  }

  // The strokes as 140x140 bytes of gray, bright on black.
  toGray() {
    this.#small.fillRect(0, 0, SIDE, SIDE);
    drawStrokes(this.#small, this.#state.strokes, SIDE, "white");
    const { data } = this.#small.getImageData(0, 0, SIDE, SIDE);
    return new Uint8Array(new Uint32Array(data.buffer)); // of each pixel the first byte
  }

  #place(event) {
    const box = this.#canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  #press(event) {
    if (!event.isPrimary || event.button !== 0) return;
    this.#lift();
    this.#pen.visible = false;
    try {
      this.#canvas.setPointerCapture(event.pointerId);
    } catch {
      // the pointer is gone already: the stroke ends with the next event
    }
    this.#begin(this.#place(event));
  }

  #move(event) {
    if (!this.#isDrawing || this.#pen.down || !event.isPrimary) return;
    const events = event.getCoalescedEvents?.() ?? [];
    this.#extend((events.length ? events : [event]).map((each) => this.#place(each)));
  }

  #begin(point) {
    this.#isDrawing = true;
    this.#history.push(this.#state);
    this.#state = { strokes: [...(this.#state.strokes ?? []), [point]] }; // a picture is drawn over
    this.#changed();
  }

  #extend(points) {
    const strokes = [...this.#state.strokes];
    strokes.push([...strokes.pop(), ...points]);
    this.#state = { strokes };
    this.#changed();
  }

  // The drawing stays as it is: its answer is on the way already.
  #lift() {
    this.#isDrawing = false;
    this.#setPen(false);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === " ") {
      if (!event.repeat) this.#pen.down ? this.#lift() : this.#lower();
    } else if (event.key in ARROWS) {
      this.#held.add(event.key);
      this.#step(event.shiftKey ? STEP / 4 : STEP);
    } else if (event.key === "Escape") {
      this.#lift();
    } else {
      return;
    }
    event.preventDefault();
    this.#showPen(true);
  }

  #lower() {
    this.#setPen(true);
    this.#begin([this.#pen.x, this.#pen.y]);
  }

  #step(length) {
    for (const key of this.#held) {
      const [x, y] = ARROWS[key];
      this.#pen.x = Math.min(1, Math.max(0, this.#pen.x + x * length));
      this.#pen.y = Math.min(1, Math.max(0, this.#pen.y + y * length));
    }
    if (this.#pen.down) this.#extend([[this.#pen.x, this.#pen.y]]);
  }

  #setPen(down) {
    if (this.#pen.down === down) return;
    this.#pen.down = down;
    this.dispatchEvent(new CustomEvent("pen", { detail: down }));
  }

  #showPen(visible) {
    this.#pen.visible = visible;
    this.paint();
  }

  #leave() {
    this.#held.clear();
    if (this.#pen.down) this.#lift();
    this.#showPen(false);
  }

  #changed() {
    this.dispatchEvent(new Event("change")); // first: the server works meanwhile
    this.paint();
  }

  #resize() {
    this.#canvas.width = this.#canvas.height =
      Math.round(this.#canvas.clientWidth * devicePixelRatio);
    this.paint();
  }

  paint() {
    const [context, side, state] = [this.#context, this.#canvas.width, this.#state];
    const style = getComputedStyle(this.#canvas);
    context.clearRect(0, 0, side, side);
    if (state.strokes) drawStrokes(context, state.strokes, side, style.color);
    if (state.picture) {
      const { width, height } = state.picture;
      const scale = side / Math.max(width, height);
      const [w, h] = [width * scale, height * scale];
      context.drawImage(state.picture, (side - w) / 2, (side - h) / 2, w, h);
    }
    if (this.#pen.visible) this.#paintPen(context, side, style.getPropertyValue("--accent"));
  }

  #paintPen(context, side, colour) {
    context.beginPath();
    context.arc(this.#pen.x * side, this.#pen.y * side, (PEN / 2) * side, 0, 2 * Math.PI);
    context.lineWidth = 2 * devicePixelRatio;
    context.strokeStyle = context.fillStyle = colour;
    this.#pen.down ? context.fill() : context.stroke();
  }
}

export function paintGray(context, pixels) {
  const image = new ImageData(28, 28);
  new Uint32Array(image.data.buffer).set(Array.from(pixels, (value) => 0xff000000 + 0x10101 * value));
  context.putImageData(image, 0, 0);
}
