// Requests to app/web/server.py.

const NO_ANSWER = "The server does not answer. Is it still running?";

// With `body`, a POST request.
export async function request(path, query = {}, body = undefined) {
  const address = `api/${path}?${new URLSearchParams(query)}`;
  let response;
  try {
    response = await fetch(address, { method: body ? "POST" : "GET", body });
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
