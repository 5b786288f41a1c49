// Requests to app/web/server.py.

export async function request(path, query = {}, body = undefined) {
  const address = `api/${path}?${new URLSearchParams(query)}`;
  let response;
  try {
    response = await fetch(address, body === undefined ? {} : { method: "POST", body });
  } catch {
    throw new Error("The server does not answer. Is it still running?");
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
