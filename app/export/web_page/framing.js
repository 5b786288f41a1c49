// Frames a drawing as app/inference/preprocess.py does: 28x28 bytes as in MNIST, bright on black.
//
// A drawing is white on black. So the steps that Python takes for photographs (find the paper, remove
// shadows and noise) are left out. tests/runtimes/test_web_folder.py compares the two over 200 drawings.

const SIDE = 28; // pixels of an MNIST image
const BOX = 20; // pixels of the longer side of a digit in it
const CENTRE = 14; // pixel index of a digit's centre of mass in it
const MIN_STROKE = 2; // width in pixels of the box
const DIGITS = ["mnist", "qmnist", "digits"];

// Find the digit, as in app/inference/strokes.py.
const MIN_ELONGATION = 2.3; // length of a stroke in its widths; a shorter part is a dot or a blot
const MIN_LENGTH = 1 / 16; // of the side of the drawing, if there are longer strokes
const ENCLOSED = 0.45; // minimum length of a digit in a frame, as a share of the frame's shorter side
const STRAIGHT = 1.15; // maximum length of a line, in diagonals of its box
const FLAT = 1.5; // minimum width of a horizontal line, in heights
const MIN_LINE = 4; // minimum length of a line, in stroke widths
const UNDERLINE = 1.2; // minimum width of a line below the digit, in widths of the digit's main part
const ELONGATED = 2.8; // widths; a shorter part is a blot beside the digit
const NEAR = 0.15; // of the length of the digit; its other parts are no farther away
const SPECK = 0.02; // share of the largest part of the digit; smaller parts are dropped

// `gray`: the bytes of a square drawing; null if there is nothing in it.
export function frame(gray, dataset) {
  const side = Math.sqrt(gray.length);
  const drawing = { width: side, height: side, data: gray };
  if (!DIGITS.includes(dataset)) {
    return gray.some(Boolean) ? Uint8Array.from(resize(drawing, SIDE, SIDE).data) : null;
  }
  const digit = findDigit(drawing);
  return digit && centre(fit(thicken(digit)));
}

// Crop to the strokes of the digit.
function findDigit(drawing) {
  const { width, data } = drawing;
  const { labels, parts } = measure(drawing);
  const main = choose(parts, width);
  if (!main) return null;
  const digit = parts.filter((part) => belongs(part, main, parts));
  const [top, left] = ["top", "left"].map((end) => Math.min(...digit.map((part) => part[end])));
  const [bottom, right] = ["bottom", "right"].map((end) => Math.max(...digit.map((part) => part[end])));
  const isNear = (x, y, reach, isWanted) => {
    for (let v = Math.max(top, y - reach); v <= Math.min(bottom - 1, y + reach); v++) {
      for (let u = Math.max(left, x - reach); u <= Math.min(right - 1, x + reach); u++) {
        const label = labels[v * width + u];
        if (label && isWanted(parts[label - 1])) return true;
      }
    }
    return false;
  };
  const isStroke = (part) => digit.includes(part);
  const cropped = { width: right - left, height: bottom - top, data: [] };
  for (let y = top; y < bottom; y++) {
    for (let x = left; x < right; x++) {
      const isOther = isNear(x, y, 3, (part) => !isStroke(part)) && !isNear(x, y, 1, isStroke);
      cropped.data.push(isOther ? 0 : data[y * width + x]);
    }
  }
  return cropped;
}

// Connected components, of eight neighbours, labelled from 1.
function measure(drawing) {
  const { width, height } = drawing;
  const isInk = inkOf(drawing);
  const labels = new Int32Array(width * height);
  const parts = [];
  for (let start = 0; start < labels.length; start++) {
    if (labels[start] || !isInk(start % width, Math.floor(start / width))) continue;
    const part = { area: 0, edge: 0, isCut: false };
    Object.assign(part, { top: Infinity, left: Infinity, bottom: 0, right: 0 });
    const label = parts.push(part);
    const stack = [start];
    labels[start] = label;
    while (stack.length) {
      const index = stack.pop();
      const [x, y] = [index % width, Math.floor(index / width)];
      part.area += 1;
      part.edge += isEdge(isInk, x, y);
      part.isCut ||= x === 0 || y === 0 || x === width - 1 || y === height - 1;
      [part.top, part.bottom] = [Math.min(part.top, y), Math.max(part.bottom, y + 1)];
      [part.left, part.right] = [Math.min(part.left, x), Math.max(part.right, x + 1)];
      for (let v = y - 1; v <= y + 1; v++) {
        for (let u = x - 1; u <= x + 1; u++) {
          if (!isInk(u, v) || labels[v * width + u]) continue;
          labels[v * width + u] = label;
          stack.push(v * width + u);
        }
      }
    }
    part.pen = (2 * part.area) / part.edge; // a long stroke has two edges
    [part.height, part.width] = [part.bottom - part.top, part.right - part.left];
    part.length = Math.max(part.height, part.width);
  }
  return { labels, parts };
}

function inkOf({ width, height, data }) {
  return (x, y) => x >= 0 && y >= 0 && x < width && y < height && data[y * width + x] > 127;
}

function isEdge(isInk, x, y) {
  return !(isInk(x - 1, y) && isInk(x + 1, y) && isInk(x, y - 1) && isInk(x, y + 1));
}

// The part with the longest stroke that is likely a digit. Apply each rule only if it leaves a candidate.
function choose(parts, side) {
  const strokes = parts.filter((part) => part.length >= MIN_ELONGATION * part.pen);
  let possible = strokes;
  for (const rule of [
    (part) => part.length >= MIN_LENGTH * side,
    (part) => !part.isCut,
    (part) => !isFrame(part, strokes),
    (part) => !isLine(part),
  ]) {
    const left = possible.filter(rule);
    if (left.length) possible = left;
  }
  return possible.reduce((best, part) => (part.edge > (best?.edge ?? 0) ? part : best), null);
}

// Whether a part is a frame: its box contains another one as long as a digit.
function isFrame(part, others) {
  return others.some(
    ({ top, left, bottom, right, length }) =>
      top > part.top && bottom < part.bottom && left > part.left && right < part.right &&
      length >= ENCLOSED * Math.min(part.height, part.width),
  );
}

function isLine({ edge, height, width, length, pen }) {
  const isStraight = edge / 2 <= STRAIGHT * Math.hypot(height, width);
  return isStraight && width >= FLAT * height && length > MIN_LINE * pen;
}

// Whether a part belongs to the digit with the main part `main`.
function belongs(part, main, parts) {
  if (part === main) return true;
  const gap = part.length >= ELONGATED * part.pen ? NEAR * main.length : 0;
  const isNear =
    part.top <= main.bottom + gap && part.bottom >= main.top - gap &&
    part.left <= main.right + gap && part.right >= main.left - gap;
  const isBelow = (part.top + part.bottom) / 2 >= main.bottom;
  const isUnderline = isLine(part) && isBelow && part.width > UNDERLINE * main.width;
  const isSpeck = part.area < SPECK * main.area;
  return (
    isNear && !isUnderline && !isSpeck && (!part.isCut || main.isCut) && !isFrame(part, parts)
  );
}

// Dilate strokes that would fade in the box.
function thicken(image) {
  const { width, height, data } = image;
  const isInk = inkOf(image);
  let [area, edge] = [0, 0];
  data.forEach((value, index) => {
    if (value <= 127) return;
    area += 1;
    edge += isEdge(isInk, index % width, Math.floor(index / width));
  });
  const scale = Math.max(width, height) / BOX;
  const grow = Math.trunc((MIN_STROKE * scale - (2 * area) / Math.max(1, edge)) / 2);
  if (grow < 1) return image;
  const grown = { width: width + 2 * grow, height: height + 2 * grow };
  grown.data = new Uint8Array(grown.width * grown.height);
  data.forEach((value, index) => {
    const [x, y] = [index % width, Math.floor(index / width)];
    for (let v = y; v <= y + 2 * grow; v++) {
      for (let u = x; u <= x + 2 * grow; u++) {
        const place = v * grown.width + u;
        grown.data[place] = Math.max(grown.data[place], value);
      }
    }
  });
  return grown;
}

// Scale the longer side to that of the box.
function fit(image) {
  const scale = BOX / Math.max(image.width, image.height);
  const [width, height] = [image.width, image.height].map((side) => Math.max(1, roundEven(side * scale)));
  return resize(image, width, height);
}

// Pillow's Lanczos filter: first the rows, then the columns, each rounded to bytes.
function resize(image, width, height) {
  return transpose(resizeRows(transpose(resizeRows(image, width)), height));
}

function transpose({ width, height, data }) {
  const turned = Array.from(data, (_, index) => data[(index % height) * width + Math.floor(index / height)]);
  return { width: height, height: width, data: turned };
}

function resizeRows(image, width) {
  if (image.width === width) return image;
  const data = new Uint8ClampedArray(width * image.height);
  const scale = image.width / width;
  const filterScale = Math.max(scale, 1);
  for (let x = 0; x < width; x++) {
    const middle = (x + 0.5) * scale;
    const first = Math.max(0, Math.trunc(middle - 3 * filterScale + 0.5));
    const end = Math.min(image.width, Math.trunc(middle + 3 * filterScale + 0.5));
    const weights = Array.from({ length: end - first }, (_, k) =>
      lanczos((first + k - middle + 0.5) / filterScale),
    );
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    for (let y = 0; y < image.height; y++) {
      const start = y * image.width + first;
      const sum = weights.reduce((s, weight, k) => s + weight * image.data[start + k], 0);
      data[y * width + x] = Math.floor(sum / total + 0.5);
    }
  }
  return { width, height: image.height, data };
}

function lanczos(x) {
  const sinc = (t) => (t === 0 ? 1 : Math.sin(Math.PI * t) / (Math.PI * t));
  return Math.abs(x) < 3 ? sinc(x) * sinc(x / 3) : 0;
}

// Put a digit's centre of mass into the centre of 28x28.
function centre({ width, height, data }) {
  const brightest = Math.max(...data);
  const digit = Array.from(data, (value) => (value * 255) / brightest);
  let [total, sumX, sumY] = [0, 0, 0];
  digit.forEach((value, index) => {
    total += value;
    sumX += value * (index % width);
    sumY += value * Math.floor(index / width);
  });
  const clip = (value, most) => Math.min(most, Math.max(0, value));
  const left = clip(roundEven(CENTRE - sumX / total), SIDE - width);
  const top = clip(roundEven(CENTRE - sumY / total), SIDE - height);
  const framed = new Uint8Array(SIDE * SIDE);
  digit.forEach((value, index) => {
    framed[(top + Math.floor(index / width)) * SIDE + left + (index % width)] = roundEven(value);
  });
  return framed;
}

function roundEven(value) {
  const low = Math.floor(value);
  if (value - low !== 0.5) return Math.round(value);
  return low % 2 ? low + 1 : low;
}
