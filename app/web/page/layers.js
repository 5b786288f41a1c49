// The outputs of the first layers, painted in two colours: positive and negative.

export class Layers {
  #element;
  #shape = "";
  #shown = null;
  #colours = palette();

  constructor(element) {
    this.#element = element;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#colours = palette();
      if (this.#shown) this.show(this.#shown);
    });
  }

  // `groups` are the server's maps; null: there are none, for the reason in `note`
  show(groups, note) {
    this.#shown = groups;
    const shape = groups ? JSON.stringify(groups.map(shapeOf)) : note;
    if (shape !== this.#shape) this.#element.replaceChildren(...(groups?.map(figure) ?? [text(note)]));
    this.#shape = shape;
    const canvases = this.#element.querySelectorAll("canvas");
    for (const [index, group] of (groups ?? []).entries()) paint(canvases[index], group, this.#colours);
  }
}

function shapeOf({ title, count, width, height }) {
  return [title, count, width, height];
}

function text(note) {
  return Object.assign(document.createElement("p"), { className: "note", textContent: note });
}

// A canvas for all maps of a layer: one for each would take several milliseconds to show.
function figure({ title, count, width, height }) {
  const [columns, gap] = gridOf(title, count, width);
  const figure = document.createElement("figure");
  figure.className = isHalf(title) ? "layer half" : "layer";
  const caption = Object.assign(document.createElement("figcaption"), { textContent: title });
  const canvas = Object.assign(document.createElement("canvas"), {
    width: columns * (width + gap) - gap,
    height: Math.ceil(count / columns) * (height + gap) - gap,
  });
  canvas.setAttribute("aria-hidden", "true");
  figure.append(caption, canvas);
  return figure;
}

function isHalf(title) {
  return title.endsWith("half");
}

// Columns of maps, and pixels between them. Many maps are twice as wide as high together.
function gridOf(title, count, width) {
  const columns = isHalf(title) ? count / 2 : Math.min(count, Math.max(8, Math.sqrt(2 * count)));
  return [Math.ceil(columns), Math.round(width / 14)];
}

function paint(canvas, { title, count, values, width, height }, colours) {
  const [columns, gap] = gridOf(title, count, width);
  const bytes = atob(values); // a character each
  const pixels = new Uint32Array(bytes.length);
  for (let index = 0; index < bytes.length; index++) pixels[index] = colours[bytes.charCodeAt(index)];
  const size = 4 * width * height;
  const context = canvas.getContext("2d");
  for (let index = 0; index < count; index++) {
    const map = new ImageData(new Uint8ClampedArray(pixels.buffer, index * size, size), width, height);
    const [row, column] = [Math.floor(index / columns), index % columns];
    context.putImageData(map, column * (width + gap), row * (height + gap));
  }
}

// A colour for each byte of an int8 value.
function palette() {
  const style = getComputedStyle(document.documentElement);
  const [zero, positive, negative] = ["zero", "positive", "negative"].map((name) =>
    style.getPropertyValue(`--map-${name}`).trim().split(" ").map(Number),
  );
  const colours = new Uint8ClampedArray(4 * 256).fill(255);
  for (let byte = 0; byte < 256; byte++) {
    const [end, size] = byte < 128 ? [positive, byte] : [negative, 256 - byte];
    const share = (size / 127) ** 0.7;
    colours.set(zero.map((from, channel) => from + share * (end[channel] - from)), 4 * byte);
  }
  return new Uint32Array(colours.buffer);
}
