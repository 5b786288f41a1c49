// Requests to app/web/server.py.

const NO_ANSWER = "The server does not answer. Is it still running?";

// Predictions over one WebSocket, which take less time than requests.
export class Predictions {
  #socket = null;

  // One call at a time: the next message is its answer.
  async ask(query, body) {
    if (this.#socket?.readyState !== WebSocket.OPEN) await this.#open(); // else it is sent at once
    const socket = this.#socket;
    const message = await new Promise((resolve, reject) => {
      socket.onmessage = resolve;
      socket.onclose = ({ reason }) => reject(new Error(reason || NO_ANSWER));
      socket.send(new URLSearchParams(query).toString());
      socket.send(body);
    });
    const answer = JSON.parse(message.data);
    if (answer.error) throw new Error(answer.error);
    return answer;
  }

  close() {
    this.#socket?.close();
    this.#socket = null;
  }

  async #open() {
    const address = new URL("api/strokes", location.href);
    address.protocol = address.protocol.replace("http", "ws");
    const socket = (this.#socket = new WebSocket(address));
    await new Promise((resolve, reject) => {
      socket.onopen = resolve;
      socket.onclose = () => reject(new Error(NO_ANSWER));
    });
  }
}

export async function request(path, query = {}) {
  const address = `api/${path}?${new URLSearchParams(query)}`;
  let response;
  try {
    response = await fetch(address);
  } catch {
    throw new Error(NO_ANSWER);
  }
  const failed = { error: `The server failed with status ${response.status}.` };
  const answer = await response.json().catch(() => failed);
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

export function decode(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length); // a loop: Uint8Array.from takes six times as long
  for (let index = 0; index < bytes.length; index++) bytes[index] = text.charCodeAt(index);
  return bytes;
}
