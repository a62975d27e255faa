// The API key, if the server wants one: in this tab's session storage, and nowhere else.

const NAME = "hotbatch.key";
let key = read();

function read() {
  try { return sessionStorage.getItem(NAME) ?? ""; } catch { return ""; }
}

export function setKey(value) {
  key = value;
  try { sessionStorage.setItem(NAME, value); } catch { /* kept for this page view only */ }
}

export function forgetKey() {
  key = "";
  try { sessionStorage.removeItem(NAME); } catch { /* it was not stored */ }
}

/** Headers for a request to this server. */
export function headers(more = {}) {
  // A header holds bytes: other characters go as UTF-8, which is what the server compares.
  const bytes = String.fromCharCode(...new TextEncoder().encode(key));
  return key ? { ...more, authorization: `Bearer ${bytes}` } : more;
}

/** Opens the dialog and resolves when a key was given. */
export function askKey(isWrong) {
  const dialog = document.getElementById("key-dialog");
  const input = document.getElementById("key");
  document.getElementById("key-wrong").textContent = isWrong ? "The server does not know this key." : "";
  input.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const form = document.getElementById("key-form");
    form.onsubmit = (event) => {
      event.preventDefault();
      setKey(input.value.trim());
      dialog.close();
      resolve();
    };
    // Without a key there is nothing to see: Escape closes the dialog only to show it again.
    dialog.onclose = () => { if (!key) dialog.showModal(); };
  });
}
