// The theme is set before anything is painted, so this is no module and stands in the head.
(() => {
  const stored = (() => {
    try { return localStorage.getItem("hotbatch.theme"); } catch { return null; }
  })();
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
})();
