// A port of app/inference/preprocess.py, step by step: from a drawing to 28x28 as in MNIST.
//
// A picture is {width, height, data}, row by row. Pictures of more than 512 pixels along a side, which
// Python reduces first, are the caller's to reduce. tests/runtimes/test_web_folder.py compares the two
// over 200 drawings.

import { borderOf, findSurfaces, roundEven } from "./paper.js";
import { findDigit, MIN_CONTRAST } from "./strokes.js";

const SIDE = 28; // pixels of an MNIST image
const BOX = 20; // pixels of the longer side of a digit in it
const CENTRE = 14; // pixel index of a digit's centre of mass in it
const FINE = 8; // resolution of the stroke width, relative to the box
const NARROW = 2; // pixels of the box: narrower strokes are widened
const FAINT = 130; // of 255, contrast of a digit; below, it is compared with the opposite shade
const STRONGER = 1.4; // minimum contrast of a digit in the opposite shade, in contrasts of the faint one
const DIGITS = ["mnist", "qmnist", "digits"];

// 784 bytes, bright on black; null if there is no digit.
export function frame(picture, dataset) {
  return DIGITS.includes(dataset) ? toDigit(picture) : toThumbnail(picture);
}

export function toDigit(picture) {
  for (const surface of findSurfaces(picture)) {
    const found = findDigit(surface);
    if (!found) continue;
    const digit = surface.isSheet ? found : checkShade(found, surface);
    return centre(fit(thicken(fit(crop(digit, surface.width), BOX * FINE)), BOX, true));
  }
  return null;
}

// The digit, or the strokes of the opposite shade if it is more likely an area beside a shadow.
function checkShade(digit, surface) {
  if (!digit.isCut && digit.contrast >= FAINT) return digit;
  const opposite = findDigit({ ...surface, data: surface.data.map((value) => 255 - value) });
  if (!opposite || opposite.isCut) return digit;
  if (!digit.isCut && opposite.contrast <= STRONGER * digit.contrast) return digit;
  const { top, bottom, left, right } = extent(digit.strokes, surface.width);
  const isBetween = opposite.strokes.every((stroke, index) => {
    const [x, y] = [index % surface.width, Math.floor(index / surface.width)];
    return !stroke || (y >= top && y < bottom && x >= left && x < right);
  });
  return isBetween ? digit : opposite;
}

// Crop to the strokes of a digit and scale their ink.
function crop(digit, width) {
  const { ink, threshold, strokes, others } = digit;
  const { top, bottom, left, right } = extent(strokes, width);
  const noise = percentile(ink.filter((value) => value < threshold), 0.9);
  const full = percentile(ink.filter((_, index) => strokes[index]), 0.9);
  const cropped = { width: right - left, height: bottom - top, data: [] };
  const hasOthers = others.includes(1);
  const near = (mask, index, reach) => {
    const [x, y] = [index % width, Math.floor(index / width)];
    for (let v = Math.max(top, y - reach); v <= Math.min(bottom - 1, y + reach); v++) {
      for (let u = Math.max(left, x - reach); u <= Math.min(right - 1, x + reach); u++) {
        if (mask[v * width + u]) return true;
      }
    }
    return false;
  };
  for (let y = top; y < bottom; y++) {
    for (let x = left; x < right; x++) {
      const index = y * width + x;
      const isOther = hasOthers && near(others, index, 3) && !near(strokes, index, 1);
      const share = isOther ? 0 : (ink[index] - noise) / (full - noise);
      cropped.data.push(roundEven(255 * clip(share, 0, 1)));
    }
  }
  return cropped;
}

export function toThumbnail(picture) {
  const background = percentile(borderOf(picture), 0.5);
  const small = fit(picture, SIDE, true);
  if (span(small.data) < MIN_CONTRAST) return null;
  const framed = new Float64Array(SIDE * SIDE).fill(background);
  paste(framed, small, (SIDE - small.width) >> 1, (SIDE - small.height) >> 1);
  const inverted = background > 127;
  return Uint8Array.from(framed, (value) => roundEven(inverted ? 255 - value : value));
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
  const grow = Math.trunc((NARROW * scale - (2 * area) / Math.max(1, edge)) / 2);
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
