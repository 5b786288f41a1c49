// The outputs of the first layers, painted in two colours: positive and negative.

import { decode } from "./api.js";

export class Layers {
  #element;
  #shape = "";
  #shown = null;

  constructor(element) {
    this.#element = element;
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.#shown && this.show(this.#shown));
  }

  // `groups` are the server's maps; null: there are none, for the reason in `note`
  show(groups, note) {
    this.#shown = groups;
    const shape = groups ? JSON.stringify(groups.map(shapeOf)) : note;
    if (shape !== this.#shape) this.#element.replaceChildren(...(groups?.map(figure) ?? [text(note)]));
    this.#shape = shape;
    const colours = paletteOf(getComputedStyle(this.#element));
    const figures = this.#element.children;
    for (const [index, group] of (groups ?? []).entries()) {
      paint(figures[index].querySelectorAll("canvas"), group, colours);
    }
  }
}

function shapeOf({ title, count, width, height }) {
  return [title, count, width, height];
}

function text(note) {
  return Object.assign(document.createElement("p"), { className: "note", textContent: note });
}

function figure({ title, count, width, height }) {
  const figure = document.createElement("figure");
  figure.className = "layer";
  figure.classList.toggle("half", title.endsWith("half"));
  figure.classList.toggle("wide", width > 2 * height);
  const caption = document.createElement("figcaption");
  caption.textContent = title;
  const maps = document.createElement("div");
  maps.className = "maps";
  for (let index = 0; index < count; index++) {
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    canvas.setAttribute("aria-hidden", "true");
    maps.append(canvas);
  }
  figure.append(caption, maps);
  return figure;
}

function paint(canvases, { values, width, height }, { zero, positive, negative }) {
  const numbers = decode(values, Int8Array);
  const size = width * height;
  for (const [index, canvas] of canvases.entries()) {
    const image = new ImageData(width, height);
    for (let pixel = 0; pixel < size; pixel++) {
      const value = numbers[index * size + pixel] / 127;
      const [end, share] = [value < 0 ? negative : positive, Math.abs(value) ** 0.7];
      for (let channel = 0; channel < 3; channel++) {
        image.data[4 * pixel + channel] = zero[channel] + share * (end[channel] - zero[channel]);
      }
      image.data[4 * pixel + 3] = 255;
    }
    canvas.getContext("2d").putImageData(image, 0, 0);
  }
}

function paletteOf(style) {
  const colour = (name) => style.getPropertyValue(name).trim().split(" ").map(Number);
  const names = { zero: "--map-zero", positive: "--map-positive", negative: "--map-negative" };
  return Object.fromEntries(Object.entries(names).map(([key, name]) => [key, colour(name)]));
}
