// A port of app/inference/paper.py: find the sheet of paper in a picture, which may be the inside of a
// drawn box, and separate ink from its background. A picture is {width, height, data}, row by row.

const COARSE_SIDE = 128; // pixels of the picture in which a sheet is found
const [MIN_SHEET, MAX_SHEET] = [0.1, 0.98]; // share of the picture
const SOLID = 0.6; // share of a sheet that is bright, at least
const COMPACTNESS = [11.7, 12.1]; // of a sheet, see `findSheet`
const BRIGHT_BORDER = 0.35; // share of bright pixels at the border from which the background is bright
const DIM = 32; // added to the background: suppresses noise in dark areas

// The parts of a picture that are searched for ink: the sheet, if one is found, and the whole picture.
export function findSurfaces(picture) {
  const { width, height, data } = picture;
  const factor = Math.ceil(Math.max(width, height) / COARSE_SIDE);
  const coarse = reduce(picture, factor);
  const threshold = otsu(coarse.data);
  const bright = { ...coarse, data: Uint8Array.from(coarse.data, (value) => value > threshold) };
  const isDark = mean(borderOf(bright)) >= BRIGHT_BORDER;
  const gray = isDark ? data : Array.from(data, (value) => 255 - value);
  const inside = new Uint8Array(data.length).fill(1);
  const surfaces = [{ width, height, data: gray, inside, isSheet: false }];
  const sheet = findSheet(bright);
  if (sheet) {
    const at = (x, y) => sheet[Math.floor(y / factor) * coarse.width + Math.floor(x / factor)];
    surfaces.unshift(crop(picture, inside.map((_, index) => at(...place(index, width)))));
  }
  return surfaces;
}

// The largest bright region without holes if it is as compact as a sheet. The compactness,
// area / sqrt(det(covariance)), is 12 for every parallelogram.
function findSheet({ width, height, data }) {
  const seen = new Uint8Array(data.length);
  let largest = [];
  for (let start = 0; start < data.length; start++) {
    const region = data[start] && !seen[start] ? regionAt(start, data, width, seen) : [];
    if (region.length > largest.length) largest = region;
  }
  const rest = new Uint8Array(data.length).fill(1);
  for (const index of largest) rest[index] = 0;
  const outside = new Uint8Array(data.length); // the rest without holes
  for (let start = 0; start < data.length; start++) {
    const [x, y] = place(start, width);
    const isBorder = x === 0 || y === 0 || x === width - 1 || y === height - 1;
    if (isBorder && rest[start] && !outside[start]) regionAt(start, rest, width, outside);
  }
  const sheet = outside.map((value) => 1 - value);
  const places = Array.from(sheet.keys()).filter((index) => sheet[index]);
  const area = places.length;
  if (area < MIN_SHEET * sheet.length || area > MAX_SHEET * sheet.length) return null;
  if (mean(places.map((index) => data[index])) < SOLID) return null; // a box in chalk
  const [columns, rows] = [0, 1].map((axis) => places.map((index) => place(index, width)[axis]));
  const covariance = (a, b) => mean(a.map((value, index) => value * b[index])) - mean(a) * mean(b);
  const variances = covariance(rows, rows) * covariance(columns, columns);
  const compactness = area / Math.sqrt(variances - covariance(rows, columns) ** 2);
  if (!(compactness >= COMPACTNESS[0] && compactness <= COMPACTNESS[1])) return null;
  const inner = erode(erode(sheet, width), width); // without its edges
  return inner.includes(1) ? inner : null;
}

function crop({ width, data }, inside) {
  const places = Array.from(inside.keys()).filter((index) => inside[index]);
  const [columns, rows] = [0, 1].map((axis) => places.map((index) => place(index, width)[axis]));
  const [top, bottom] = [rows[0], rows[rows.length - 1]]; // row by row
  const left = columns.reduce((a, b) => Math.min(a, b));
  const right = columns.reduce((a, b) => Math.max(a, b));
  const isIn = (_, index) => {
    const [x, y] = place(index, width);
    return x >= left && x <= right && y >= top && y <= bottom;
  };
  const size = { width: right - left + 1, height: bottom - top + 1 };
  return { ...size, data: Array.from(data).filter(isIn), inside: inside.filter(isIn), isSheet: true };
}

// The pixels of `mask` connected to `start` by edges; marks them in `seen`.
function regionAt(start, mask, width, seen) {
  const region = [start];
  seen[start] = 1;
  for (const index of region) {
    for (const next of neighboursOf(index, width)) {
      if (!mask[next] || seen[next]) continue;
      seen[next] = 1;
      region.push(next);
    }
  }
  return region;
}

function erode(mask, width) {
  const keeps = (index) => neighboursOf(index, width).every((next) => mask[next] ?? 1);
  return mask.map((value, index) => value && Number(keeps(index)));
}

// The four neighbours; those outside of the picture are no index of it.
function neighboursOf(index, width) {
  const x = index % width;
  return [index - width, index + width, x > 0 ? index - 1 : -1, x < width - 1 ? index + 1 : -1];
}

function place(index, width) {
  return [index % width, Math.floor(index / width)];
}

// The pixels of a mask with one of four neighbours outside of it.
export function edgeOf(mask, width) {
  const isEdge = (index) => neighboursOf(index, width).some((next) => !mask[next]);
  return mask.map((value, index) => value && Number(isEdge(index)));
}

// The contrast to the background: the closing, the minimum of the maxima in a square.
export function inkOf({ width, height, data, inside }, side) {
  let background = data;
  for (const better of [Math.max, Math.min]) {
    background = slide(background, width, height, side, better, width, 1);
    background = slide(background, height, width, side, better, 1, width);
  }
  const contrast = (shade, index) => ((shade - data[index]) * 255) / (shade + DIM);
  return Float64Array.from(background, (shade, index) => inside[index] && contrast(shade, index));
}

// The best value in a window of `side` pixels along lines, in log(side) passes: each doubles the reach.
function slide(data, count, lines, side, better, next, step) {
  const half = side >> 1;
  const result = new Float64Array(data.length);
  const window = new Float64Array(count + 2 * half);
  for (let line = 0; line < lines; line++) {
    for (let index = 0; index < window.length; index++) {
      const place = Math.min(count - 1, Math.max(0, index - half));
      window[index] = data[line * next + place * step];
    }
    let reach = 1;
    for (; 2 * reach <= side; reach *= 2) {
      for (let index = 0; index + reach < window.length; index++) {
        window[index] = better(window[index], window[index + reach]);
      }
    }
    for (let place = 0; place < count; place++) {
      result[line * next + place * step] = better(window[place], window[place + side - reach]);
    }
  }
  return result;
}

// The mean of squares of `factor` pixels.
function reduce({ width, height, data }, factor) {
  const [columns, rows] = [Math.ceil(width / factor), Math.ceil(height / factor)];
  const [sums, counts] = [new Float64Array(columns * rows), new Float64Array(columns * rows)];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const index = Math.floor(y / factor) * columns + Math.floor(x / factor);
      sums[index] += data[y * width + x];
      counts[index] += 1;
    }
  }
  const means = sums.map((sum, index) => Math.floor(sum / counts[index] + 0.5));
  return { width: columns, height: rows, data: means };
}

// Otsu's threshold, in the middle of a plateau.
export function otsu(ink) {
  const histogram = new Float64Array(256);
  for (const value of ink) histogram[Math.floor(value)] += 1;
  const sum = histogram.reduce((total, count, shade) => total + count * shade, 0);
  let [below, total, best, edges] = [0, 0, -1, []];
  histogram.forEach((count, shade) => {
    below += count;
    total += count * shade;
    const above = ink.length - below;
    const gap = below && above ? total / below - (sum - total) / above : 0;
    const between = below * above * gap ** 2;
    if (between > best) [best, edges] = [between, []];
    if (between === best) edges.push(shade + 1);
  });
  return mean(edges);
}

export function borderOf({ width, height, data }) {
  const border = [];
  for (let x = 0; x < width; x++) border.push(data[x], data[(height - 1) * width + x]);
  for (let y = 0; y < height; y++) border.push(data[y * width], data[(y + 1) * width - 1]);
  return border;
}

export function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

export function roundEven(value) {
  const low = Math.floor(value);
  if (value - low !== 0.5) return Math.round(value);
  return low % 2 ? low + 1 : low;
}
