// A port of app/inference/preprocess.py, step by step: from a picture to 28x28 as in MNIST.
//
// A picture is {width, height, data}, row by row. Pictures of more than 512 pixels along a side,
// which Python reduces first, are the caller's to reduce. tests/runtimes/test_web_folder.py
// compares the two over 200 drawings.

const SIDE = 28; // pixels of an MNIST image
const BOX = 20; // pixels of the longer side of a digit in it
const CENTRE = 14; // pixel index of a digit's centre of mass in it
const FINE = 8; // resolution of the stroke width, relative to the box
const MIN_STROKE = 2; // pixels of the box
const FIT_SIDE = 64; // samples along a side for the fit of the paper
const MIN_CONTRAST = 20; // of 255, between ink and background
const SPECK = 0.02; // share of the ink: a smaller component is dust
const DIGITS = ["mnist", "qmnist", "digits"];

// 784 bytes, bright on black; null for a blank picture.
export function frame(picture, dataset) {
  return DIGITS.includes(dataset) ? toDigit(picture) : toThumbnail(picture);
}

export function toDigit(picture) {
  const { width, height } = picture;
  const ink = inkOf(picture);
  const threshold = otsu(ink);
  const strokes = ink.map((value) => (value >= threshold ? 1 : 0));
  const inside = ink.filter((_, index) => strokes[index]);
  const outside = ink.filter((_, index) => !strokes[index]);
  if (!inside.length || mean(inside) - mean(outside) < MIN_CONTRAST) return null;
  const { top, bottom, left, right } = extent(withoutSpecks(strokes, width, height), width);
  const noise = percentile(outside, 0.9);
  const full = percentile(inside, 0.9);
  const crop = { width: right - left, height: bottom - top, data: [] };
  for (let y = top; y < bottom; y++) {
    for (let x = left; x < right; x++) {
      const share = (ink[y * width + x] - noise) / (full - noise);
      crop.data.push(roundEven(255 * clip(share, 0, 1)));
    }
  }
  return centre(fit(thicken(fit(crop, BOX * FINE)), BOX, true));
}

export function toThumbnail(picture) {
  const { width, height, data } = picture;
  const edge = [];
  for (let x = 0; x < width; x++) edge.push(data[x], data[(height - 1) * width + x]);
  for (let y = 0; y < height; y++) edge.push(data[y * width], data[(y + 1) * width - 1]);
  const background = percentile(edge, 0.5);
  const small = fit(picture, SIDE, true);
  if (span(small.data) < MIN_CONTRAST) return null;
  const framed = new Float64Array(SIDE * SIDE).fill(background);
  paste(framed, small, (SIDE - small.width) >> 1, (SIDE - small.height) >> 1);
  const inverted = background > 127;
  return Uint8Array.from(framed, (value) => roundEven(inverted ? 255 - value : value));
}

// The ink: the difference from the paper, a quadratic surface fitted to what is no stroke.
function inkOf({ width, height, data }) {
  const across = Float64Array.from({ length: width }, (_, x) => (2 * x) / (width - 1) - 1);
  const down = Float64Array.from({ length: height }, (_, y) => (2 * y) / (height - 1) - 1);
  const ring = Math.max(1, Math.floor(Math.min(height, width) / 20));
  const border = [];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const inner = y >= ring && y < height - ring && x >= ring && x < width - ring;
      if (!inner) border.push(data[y * width + x]);
    }
  }
  const level = percentile(border, 0.5);
  const difference = Float64Array.from(data, (value) => value - level);
  const stepX = Math.max(1, Math.floor(width / FIT_SIDE));
  const stepY = Math.max(1, Math.floor(height / FIT_SIDE));
  for (let round = 0; round < 3; round++) {
    const limit = Math.max(8, span(difference) / 4);
    const matrix = Array.from({ length: 6 }, () => new Float64Array(7));
    for (let y = 0; y < height; y += stepY) {
      for (let x = 0; x < width; x += stepX) {
        const index = y * width + x;
        if (Math.abs(difference[index]) > limit) continue;
        const terms = termsAt(across[x], down[y]);
        for (let row = 0; row < 6; row++) {
          for (let column = 0; column < 6; column++) {
            matrix[row][column] += terms[row] * terms[column];
          }
          matrix[row][6] += terms[row] * data[index];
        }
      }
    }
    const light = solve(matrix);
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        const terms = termsAt(across[x], down[y]);
        const paper = terms.reduce((sum, term, index) => sum + term * light[index], 0);
        difference[y * width + x] = data[y * width + x] - paper;
      }
    }
  }
  const sign = mean(difference) < 0 ? -1 : 1;
  return difference.map((value) => clip(sign * value, 0, 255));
}

function termsAt(x, y) {
  return [1, x, y, x * x, x * y, y * y];
}

// Gaussian elimination with pivoting; [rows, rows + 1], the last column is the right side.
function solve(matrix) {
  const count = matrix.length;
  for (let column = 0; column < count; column++) {
    let pivot = column;
    for (let row = column + 1; row < count; row++) {
      if (Math.abs(matrix[row][column]) > Math.abs(matrix[pivot][column])) pivot = row;
    }
    [matrix[column], matrix[pivot]] = [matrix[pivot], matrix[column]];
    if (Math.abs(matrix[column][column]) < 1e-9) continue; // that term is not determined: 0
    for (let row = 0; row < count; row++) {
      if (row === column) continue;
      const factor = matrix[row][column] / matrix[column][column];
      for (let k = column; k <= count; k++) matrix[row][k] -= factor * matrix[column][k];
    }
  }
  return matrix.map((row, index) => (Math.abs(row[index]) < 1e-9 ? 0 : row[count] / row[index]));
}

// Otsu's threshold, in the middle of a plateau.
function otsu(ink) {
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

// Without components, of eight neighbours, that are small.
function withoutSpecks(strokes, width, height) {
  const labels = new Int32Array(strokes.length);
  const sizes = [0];
  for (let start = 0; start < strokes.length; start++) {
    if (!strokes[start] || labels[start]) continue;
    const label = sizes.push(0) - 1;
    const stack = [start];
    labels[start] = label;
    while (stack.length) {
      const index = stack.pop();
      sizes[label] += 1;
      const [x, y] = [index % width, Math.floor(index / width)];
      for (let v = Math.max(0, y - 1); v <= Math.min(height - 1, y + 1); v++) {
        for (let u = Math.max(0, x - 1); u <= Math.min(width - 1, x + 1); u++) {
          const next = v * width + u;
          if (!strokes[next] || labels[next]) continue;
          labels[next] = label;
          stack.push(next);
        }
      }
    }
  }
  const least = SPECK * sizes.reduce((total, size) => total + size, 0);
  const kept = strokes.map((_, index) => (labels[index] && sizes[labels[index]] >= least ? 1 : 0));
  return kept.includes(1) ? kept : strokes;
}

function extent(strokes, width) {
  const box = { top: Infinity, bottom: 0, left: Infinity, right: 0 };
  strokes.forEach((stroke, index) => {
    if (!stroke) return;
    const [x, y] = [index % width, Math.floor(index / width)];
    box.top = Math.min(box.top, y);
    box.bottom = Math.max(box.bottom, y + 1);
    box.left = Math.min(box.left, x);
    box.right = Math.max(box.right, x + 1);
  });
  return box;
}

function fit(image, side, enlarge = false) {
  const scale = side / Math.max(image.width, image.height);
  if (scale > 1 && !enlarge) return image;
  const [width, height] = [image.width, image.height].map((length) =>
    Math.max(1, roundEven(length * scale)),
  );
  return resize(image, width, height);
}

// Pillow's Lanczos filter: first the rows, then the columns, each rounded to bytes.
function resize({ width, height, data }, newWidth, newHeight) {
  let rows = data;
  if (newWidth !== width) {
    rows = new Float64Array(newWidth * height);
    weightsOf(width, newWidth).forEach(({ first, weights }, x) => {
      for (let y = 0; y < height; y++) {
        const sum = weights.reduce((s, weight, k) => s + weight * data[y * width + first + k], 0);
        rows[y * newWidth + x] = clip(Math.floor(sum + 0.5), 0, 255);
      }
    });
  }
  let result = rows;
  if (newHeight !== height) {
    result = new Float64Array(newWidth * newHeight);
    weightsOf(height, newHeight).forEach(({ first, weights }, y) => {
      for (let x = 0; x < newWidth; x++) {
        const sum = weights.reduce((s, weight, k) => s + weight * rows[(first + k) * newWidth + x], 0);
        result[y * newWidth + x] = clip(Math.floor(sum + 0.5), 0, 255);
      }
    });
  }
  return { width: newWidth, height: newHeight, data: result };
}

function weightsOf(length, newLength) {
  const scale = length / newLength;
  const filterScale = Math.max(scale, 1);
  return Array.from({ length: newLength }, (_, index) => {
    const middle = (index + 0.5) * scale;
    const first = Math.max(0, Math.trunc(middle - 3 * filterScale + 0.5));
    const end = Math.min(length, Math.trunc(middle + 3 * filterScale + 0.5));
    const weights = Array.from({ length: end - first }, (_, k) =>
      lanczos((first + k - middle + 0.5) / filterScale),
    );
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return { first, weights: weights.map((weight) => weight / sum) };
  });
}

function lanczos(x) {
  return Math.abs(x) < 3 ? sinc(x) * sinc(x / 3) : 0;
}

function sinc(x) {
  return x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x);
}

// Dilates strokes that would fade in the box.
function thicken(image) {
  const { width, height, data } = image;
  const at = (x, y) => x >= 0 && y >= 0 && x < width && y < height && data[y * width + x] > 127;
  let [area, edge] = [0, 0];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (!at(x, y)) continue;
      area += 1;
      if (!(at(x - 1, y) && at(x + 1, y) && at(x, y - 1) && at(x, y + 1))) edge += 1;
    }
  }
  const scale = Math.max(width, height) / BOX;
  const grow = Math.trunc((MIN_STROKE * scale - (2 * area) / Math.max(1, edge)) / 2);
  if (grow < 1) return image;
  const [newWidth, newHeight] = [width + 2 * grow, height + 2 * grow];
  const result = new Float64Array(newWidth * newHeight);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      for (let v = y; v <= y + 2 * grow; v++) {
        for (let u = x; u <= x + 2 * grow; u++) {
          const index = v * newWidth + u;
          result[index] = Math.max(result[index], data[y * width + x]);
        }
      }
    }
  }
  return { width: newWidth, height: newHeight, data: result };
}

// Puts a digit's centre of mass into the centre of 28x28.
function centre(image) {
  const { width, height, data } = image;
  const brightest = data.reduce((most, value) => Math.max(most, value), 0);
  const digit = data.map((value) => (value * 255) / brightest);
  let [total, sumX, sumY] = [0, 0, 0];
  digit.forEach((value, index) => {
    total += value;
    sumX += value * (index % width);
    sumY += value * Math.floor(index / width);
  });
  const left = clip(roundEven(CENTRE - sumX / total), 0, SIDE - width);
  const top = clip(roundEven(CENTRE - sumY / total), 0, SIDE - height);
  const framed = new Uint8Array(SIDE * SIDE);
  paste(framed, { width, height, data: digit.map(roundEven) }, left, top);
  return framed;
}

function paste(target, { width, height, data }, left, top) {
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) target[(top + y) * SIDE + left + x] = data[y * width + x];
  }
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function span(values) {
  return values.reduce((a, b) => Math.max(a, b), -Infinity) -
    values.reduce((a, b) => Math.min(a, b), Infinity);
}

function percentile(values, share) {
  const sorted = Float64Array.from(values).sort();
  const place = share * (sorted.length - 1);
  const [low, high] = [Math.floor(place), Math.ceil(place)];
  return sorted[low] + (place - low) * (sorted[high] - sorted[low]);
}

function clip(value, least, most) {
  return Math.min(most, Math.max(least, value));
}

function roundEven(value) {
  const low = Math.floor(value);
  if (value - low !== 0.5) return Math.round(value);
  return low % 2 ? low + 1 : low;
}
