// A network's answer to the current drawing.

import { decode, request } from "./api.js";
import { showBars, showVerdict } from "./bars.js";
import { paintGray } from "./drawing.js";
import { Layers } from "./layers.js";

const NO_MAPS = "An exported file gives only its answer: choose torch to see the layers.";

export class Panel {
  #parts;
  #layers;
  #wanted = null; // the newest drawing, and the one that the page shows the answer to
  #shown = null;
  #busy = false;
  #classes = [];

  constructor(root, networks) {
    const part = (selector) => root.querySelector(selector);
    this.#parts = {
      root,
      select: part("select"),
      output: part("output"),
      sure: part(".sure"),
      input: part(".input canvas").getContext("2d"),
      bars: part(".bars"),
      problem: part(".problem"),
      cost: part(".cost"),
    };
    this.#parts.select.append(...options(networks));
    this.#parts.select.addEventListener("change", () => {
      this.#name();
      this.#shown = null;
      this.#answer();
    });
    this.#layers = new Layers(part(".layers"));
    this.#name();
  }

  get network() {
    return this.#parts.select.value;
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
        this.#parts.problem.textContent = error.message ?? error; // wasm throws numbers, too
      }
      this.#shown = drawing;
    }
    this.#busy = false;
  }

  #render(answer, drawing) {
    const { output, sure, input, bars, problem, cost } = this.#parts;
    const probabilities = answer?.probabilities ?? null;
    if (answer) this.#classes = answer.classes;
    showVerdict(output, sure, this.#classes, probabilities);
    showBars(bars, this.#classes, probabilities);
    problem.textContent = "";
    if (answer?.image) paintGray(input, decode(answer.image));
    else input.clearRect(0, 0, 28, 28);
    const { maps, image } = answer ?? {}; // undefined maps: no network of this page has them
    this.#layers.show(maps ?? null, image && maps === null ? NO_MAPS : "");
    const [framing, network] = Object.values(answer?.milliseconds ?? {}).map((ms) => ms.toFixed(1));
    cost.textContent = answer ? `Framing ${framing} ms, network ${network} ms` : "";
    output.dataset.version = drawing.version;
  }

  #name() {
    const option = this.#parts.select.selectedOptions[0];
    this.#parts.root.setAttribute("aria-label", `Answer of ${option?.textContent ?? "no network"}`);
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
