// A network's answer to the current drawing.

import { decode, request } from "./api.js";
import { showBars, showVerdict } from "./bars.js";
import { paintGray } from "./drawing.js";
import { Layers } from "./layers.js";

const NO_MAPS = "An exported file gives only its answer: choose torch to see the layers.";

export class Panel {
  #part;
  #layers;
  #wanted = null; // the newest drawing, and the one that the page shows the answer to
  #shown = null;
  #busy = false;
  #classes = [];

  constructor(root, networks) {
    this.#part = (selector) => root.querySelector(selector);
    const select = this.#part("select");
    const name = () =>
      root.setAttribute("aria-label", `Answer of ${select.selectedOptions[0].textContent}`);
    select.append(...options(networks));
    select.addEventListener("change", () => {
      name();
      this.#shown = null;
      this.#answer();
    });
    this.#layers = new Layers(this.#part(".layers"));
    name();
  }

  get network() {
    return this.#part("select").value;
  }

  // Only the newest drawing is sent while an answer is on its way: none waits in a queue.
  show(drawing) {
    this.#wanted = drawing;
    this.#answer();
  }

  async #answer() {
    if (this.#busy) return;
    this.#busy = true;
    while (this.#wanted !== this.#shown) {
      const [drawing, network] = [this.#wanted, this.network];
      try {
        const { body } = drawing;
        const answer = body ? await request("predict", { network }, body) : null;
        if (network !== this.network) continue;
        this.#render(answer, drawing);
      } catch (error) {
        this.#render(null, drawing);
        this.#part(".problem").textContent = error.message;
      }
      this.#shown = drawing;
    }
    this.#busy = false;
  }

  #render(answer, drawing) {
    const [output, input] = [this.#part("output"), this.#part(".input canvas").getContext("2d")];
    const probabilities = answer?.probabilities ?? null;
    if (answer) this.#classes = answer.classes;
    showVerdict(output, this.#part(".sure"), this.#classes, probabilities);
    showBars(this.#part(".bars"), this.#classes, probabilities);
    this.#part(".problem").textContent = "";
    if (answer?.image) paintGray(input, decode(answer.image));
    else input.clearRect(0, 0, 28, 28);
    const { maps, image } = answer ?? {}; // undefined maps: no network of this page has them
    this.#layers.show(maps ?? null, image && maps === null ? NO_MAPS : "");
    const [framing, network] = Object.values(answer?.milliseconds ?? {}).map((ms) => ms.toFixed(1));
    this.#part(".cost").textContent = answer ? `Framing ${framing} ms, network ${network} ms` : "";
    output.dataset.version = drawing.version;
  }
}

function options(networks) {
  const groups = new Map();
  for (const network of networks) {
    const folder = network.id.replace(/[^/]*$/, "");
    if (!groups.has(folder)) {
      const label = [network.started, network.dataset].filter(Boolean).join(" · ");
      const group = Object.assign(document.createElement("optgroup"), { label });
      groups.set(folder, group);
    }
    const accuracy = network.accuracy === null ? "" : ` · ${(100 * network.accuracy).toFixed(2)}%`;
    const size = network.parameters === null ? "" : ` ${Math.round(network.parameters / 1000)}k`;
    const text = `${network.title}${size} · ${network.runtime}${accuracy}`;
    groups.get(folder).append(new Option(text, network.id));
  }
  return groups.values();
}
