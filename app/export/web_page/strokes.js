// A port of app/inference/strokes.py: find the digit in the ink of a surface. Discard strokes cut by the
// border, frames, lines, blots and specks.

import { edgeOf, inkOf, mean, otsu, roundEven } from "./paper.js";

export const MIN_CONTRAST = 20; // of 255, between ink and background
const WIDEST_STROKE = 0.35; // of the longer side of the picture
const MIN_CLOSING = 7; // side in pixels
const CLOSING = 2; // side of the closing, in stroke widths
const NARROWER = 0.7; // maximum side of the next closing, as a share of the side of the one before
const SHADOW = 0.9; // a removed region is a shadow if its ink is at most this share of the strokes' ink
const MIN_ELONGATION = 2.3; // length of a stroke in its widths; a shorter part is a dot or a blot
// minimum distance between strokes on a sheet, in stroke widths; below, the sheet is the inside of an 8
// in chalk
const MIN_SPACING = 2;
const MIN_LENGTH = 1 / 16; // of the longer side of the picture, if there are longer strokes
const ENCLOSED = 0.45; // minimum length of a digit in a frame, as a share of the frame's shorter side
const STRAIGHT = 1.15; // maximum length of a line, in diagonals of its box
const FLAT = 1.5; // minimum width of a horizontal line, in heights
const MIN_LINE = 4; // minimum length of a line, in stroke widths
const UNDERLINE = 1.2; // minimum width of a line below the digit, in widths of the digit's main part
const ELONGATED = 2.8; // widths; a shorter part is a blot beside the digit
const NEAR = 0.15; // of the length of the digit; its other parts are no farther away
const SPECK = 0.02; // share of the largest part of the digit; smaller parts are dropped

// Start with a closing wider than any stroke, measure the stroke width, and repeat with a narrower one:
// the narrowest removes the most shadow.
export function findDigit(surface) {
  const { width, height } = surface;
  let side = Math.max(MIN_CLOSING, roundEven(WIDEST_STROKE * Math.max(width, height)));
  let found = findStrokes(surface, side);
  while (found) {
    const narrower = Math.max(MIN_CLOSING, roundEven(CLOSING * found.pen));
    if (narrower >= NARROWER * side) break;
    side = narrower;
    const finer = findStrokes(surface, side);
    if (!finer || losesInk(found, finer)) break;
    found = finer;
  }
  return found;
}

// Whether ink of `digit` that `part` lacks is as dark as the ink of both: no shadow.
function losesInk(digit, part) {
  const lost = digit.ink.filter((_, index) => digit.strokes[index] && !part.strokes[index]);
  const kept = digit.ink.filter((_, index) => digit.strokes[index] && part.strokes[index]);
  if (!lost.length || !kept.length) return lost.length > 0;
  return mean(lost) > SHADOW * mean(kept);
}

function findStrokes(surface, side) {
  const ink = inkOf(surface, side | 1);
  const found = strokesAbove(otsu(ink), ink, surface);
  if (!found?.isCut) return found;
  // a band of shadow across the picture: the ink in it is darker
  const darker = strokesAbove(otsu(ink.filter((_, index) => found.strokes[index])), ink, surface);
  return darker && !darker.isCut && !losesInk(found, darker) ? darker : found;
}

function strokesAbove(threshold, ink, surface) {
  const isInk = ink.map((value) => (value >= threshold ? 1 : 0));
  const line = ink.filter((_, index) => isInk[index]);
  const rest = ink.filter((_, index) => !isInk[index]);
  if (!line.length || mean(line) - (rest.length ? mean(rest) : 0) < MIN_CONTRAST) return null;
  const { labels, parts } = measure(isInk, surface);
  const main = choose(parts, surface);
  if (!main) return null;
  const kept = [false, ...parts.map((part) => belongs(part, main, parts))];
  const strokes = isInk.map((value, index) => (value && kept[labels[index]] ? 1 : 0));
  const others = isInk.map((value, index) => (value && !strokes[index] ? 1 : 0));
  const contrast = mean(ink.filter((_, index) => strokes[index]));
  return { ink, threshold, strokes, others, pen: main.pen, isCut: main.isCut, contrast };
}

// Connected components, of eight neighbours, labelled from 1.
function measure(isInk, { width, height, inside }) {
  const border = edgeOf(inside, width);
  const labels = new Int32Array(isInk.length);
  const parts = [];
  const at = (x, y) => x >= 0 && y >= 0 && x < width && y < height && isInk[y * width + x];
  for (let start = 0; start < isInk.length; start++) {
    if (!isInk[start] || labels[start]) continue;
    const part = { area: 0, edge: 0, isCut: false };
    Object.assign(part, { top: Infinity, left: Infinity, bottom: 0, right: 0 });
    const label = parts.push(part);
    const stack = [start];
    labels[start] = label;
    while (stack.length) {
      const index = stack.pop();
      const [x, y] = [index % width, Math.floor(index / width)];
      part.area += 1;
      if (!(at(x - 1, y) && at(x + 1, y) && at(x, y - 1) && at(x, y + 1))) part.edge += 1;
      part.isCut ||= border[index] === 1;
      [part.top, part.bottom] = [Math.min(part.top, y), Math.max(part.bottom, y + 1)];
      [part.left, part.right] = [Math.min(part.left, x), Math.max(part.right, x + 1)];
      for (let v = y - 1; v <= y + 1; v++) {
        for (let u = x - 1; u <= x + 1; u++) {
          if (!at(u, v) || labels[v * width + u]) continue;
          labels[v * width + u] = label;
          stack.push(v * width + u);
        }
      }
    }
    part.pen = (2 * part.area) / part.edge;
    [part.height, part.width] = [part.bottom - part.top, part.right - part.left];
    part.length = Math.max(part.height, part.width);
  }
  return { labels, parts };
}

// The part with the longest stroke that is likely a digit. Apply each rule only if it
// leaves a candidate.
function choose(parts, surface) {
  const side = Math.max(surface.width, surface.height);
  const spacing = surface.isSheet ? spacingOf(parts, surface) : Infinity;
  const strokes = parts.filter(
    (part) =>
      part.length >= MIN_ELONGATION * part.pen &&
      (!surface.isSheet || (!part.isCut && MIN_SPACING * part.pen <= spacing)),
  );
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

// The mean width of the background between the strokes and the edges of a sheet.
function spacingOf(parts, { width, inside }) {
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const edge = sum(edgeOf(inside, width)) + sum(parts.map((part) => part.edge));
  return (2 * (sum(inside) - sum(parts.map((part) => part.area)))) / edge;
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
